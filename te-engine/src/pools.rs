//! [`PoolMemory`]: the CXL pools that an engine has opened.

use te_core::MemSpan;

/// The pools that the CXL fabric has opened. None where this build lacks it, or where it is not used.
#[derive(Debug, Default)]
pub(crate) struct PoolMemory {
    #[cfg(feature = "cxl")]
    opened: std::sync::OnceLock<std::vec::Vec<std::sync::Arc<te_cxl::Pool>>>,
}

impl PoolMemory {
    /// The span, as memory of the pool in which it is, where only the CXL fabric may move it.
    pub(crate) fn located(&self, span: MemSpan) -> MemSpan {
        #[cfg(feature = "cxl")]
        let span = self.all().iter().fold(span, |span, pool| pool.located(span));
        span
    }
}

#[cfg(feature = "cxl")]
impl PoolMemory {
    /// Keeps the pools that the fabric has opened.
    pub(crate) fn opened(&self, pools: std::vec::Vec<std::sync::Arc<te_cxl::Pool>>) {
        let first = self.opened.set(pools);
        debug_assert!(first.is_ok(), "the fabric is opened once");
    }

    /// The pools, in the order of the setting.
    pub(crate) fn all(&self) -> &[std::sync::Arc<te_cxl::Pool>] {
        self.opened.get().map_or(&[], |pools| pools)
    }
}
