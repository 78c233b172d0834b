//! What this build reaches of GPUs, through the libraries of their drivers.

/// The devices of one vendor, as text, or why there is none.
pub(crate) type Reached = (&'static str, Result<Vec<String>, String>);

/// Loads the libraries and lists the devices. Empty: this build has neither of the features.
pub(crate) fn gather() -> Vec<Reached> {
    vec![
        #[cfg(feature = "cuda")]
        ("CUDA", devices(te_gpu::Gpu::cuda(te_gpu::Config::default()))),
        #[cfg(feature = "hip")]
        ("HIP", devices(te_gpu::Gpu::hip(te_gpu::Config::default()))),
    ]
}

#[cfg(any(feature = "cuda", feature = "hip"))]
fn devices(gpu: Result<te_gpu::Gpu, te_gpu::SettingError>) -> Result<Vec<String>, String> {
    let gpu = gpu.map_err(|error| error.to_string())?;
    let devices = gpu.devices().map_err(|error| error.to_string())?;
    let named = |device: &te_gpu::DeviceInfo| match device.pci {
        Some(pci) => format!("{} at {pci}", device.location),
        None => device.location.to_string(),
    };
    Ok(devices.iter().map(named).collect())
}
