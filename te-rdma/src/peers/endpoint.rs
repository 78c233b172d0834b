//! One peer: its addresses, and the control connection to it.

use te_fabric::Export;
use te_fabric::peer::Contact;

/// One peer: one incarnation of a target.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) contact: Contact,
    /// Index of the control connection to it.
    pub(super) connection: Option<u32>,
}

impl Endpoint {
    pub(super) fn new(export: &Export) -> Self {
        Self { contact: Contact::new(export), connection: None }
    }
}
