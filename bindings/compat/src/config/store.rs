//! The settings of a store: the arguments of `setup`, its dictionary, the configuration file.

use std::fs;
use std::io::Read as _;
use std::path::Path;

use serde_json::Value;

use super::{ConfigError, parse_bool, parse_size};

/// The settings with which a store is set up: the arguments of Mooncake's `setup`, with its defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreConfig {
    /// The host under which peers reach this process, with or without a port.
    pub local_hostname: String,
    /// The metadata string. Snowskin's store needs none; it is kept for the engine.
    pub metadata_server: String,
    /// Memory that this process contributes, bytes; 0: none.
    pub global_segment_size: u64,
    /// Longest object that `put` and `get` of bytes take, bytes; 0: no limit.
    pub local_buffer_size: u64,
    /// The protocol.
    pub protocol: String,
    /// RDMA devices, separated by commas; empty or `auto-discovery`: all.
    pub rdma_devices: String,
    /// The master: `host:port`.
    pub master_server_addr: String,
    /// The socket at which dummy clients reach this process; empty: none.
    pub ipc_socket_path: String,
    /// Whether objects are offloaded to a local disk.
    pub enable_ssd_offload: bool,
    /// The directory for that.
    pub ssd_offload_path: String,
    /// The tenant.
    pub tenant_id: String,
    /// Whether this process serves HTTP.
    pub enable_client_http_server: bool,
    /// At this port.
    pub client_http_port: u16,
}

/// Default sizes of `setup(dict)` (`MS/include/types.h`).
const DICT_SIZE: u64 = 16 << 20;
/// Default sizes of the configuration file and the environment (`MW/mooncake/mooncake_config.py`).
const FILE_SEGMENT_SIZE: u64 = 3_355_443_200;
const FILE_BUFFER_SIZE: u64 = 1 << 30;
/// Least size other than 0, and largest size of the local buffer, bytes.
const SIZE_MIN: u64 = 1024;
const BUFFER_SIZE_MAX: u64 = 1 << 40;
/// Longest configuration file, bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Longest value, bytes.
const VALUE_BYTES_MAX: usize = 4096;

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            local_hostname: String::new(),
            metadata_server: String::new(),
            global_segment_size: DICT_SIZE,
            local_buffer_size: DICT_SIZE,
            protocol: "tcp".into(),
            rdma_devices: String::new(),
            master_server_addr: "127.0.0.1:50051".into(),
            ipc_socket_path: String::new(),
            enable_ssd_offload: false,
            ssd_offload_path: String::new(),
            tenant_id: "default".into(),
            enable_client_http_server: false,
            client_http_port: 9300,
        }
    }
}

impl StoreConfig {
    /// The settings of a dictionary as `setup(config)` takes it. Keys that Mooncake does not know are
    /// ignored, as there.
    ///
    /// ```
    /// use snowskin_compat::config::StoreConfig;
    /// let config = StoreConfig::from_pairs([
    ///     ("local_hostname", "localhost"), ("metadata_server", "P2PHANDSHAKE"), ("global_segment_size", "32mb"),
    /// ])?;
    /// assert_eq!(config.global_segment_size, 32 << 20);
    /// # Ok::<(), snowskin_compat::config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// `Missing` for `local_hostname` and `metadata_server`; `Invalid` for a value of another kind.
    pub fn from_pairs<K: AsRef<str>, V: AsRef<str>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ConfigError> {
        let mut this = Self::default();
        for (key, value) in pairs {
            this.set(key.as_ref(), value.as_ref())?;
        }
        this.validate()?;
        Ok(this)
    }

    /// The settings of a JSON file with the keys of `MooncakeConfig.from_file`.
    ///
    /// # Errors
    /// `File` if it cannot be read, is longer than 1 MiB, or is not a JSON object; `Missing` and `Invalid` as
    /// [`from_pairs`](Self::from_pairs), and for `master_server_address`.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let refuse = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
        let file = fs::File::open(path).map_err(|error| refuse(error.to_string()))?;
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| refuse(error.to_string()))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(refuse(format!("longer than {FILE_BYTES_MAX} bytes")));
        }
        let values: Value =
            serde_json::from_str(&text).map_err(|error| refuse(format!("not JSON: {error}")))?;
        let Value::Object(values) = values else { return Err(refuse("not a JSON object".into())) };
        let mut this = Self::for_files();
        for (key, value) in &values {
            let text = match value {
                Value::Null => continue,
                Value::String(text) => text.clone(),
                Value::Bool(_) | Value::Number(_) => value.to_string(),
                Value::Array(_) | Value::Object(_) => {
                    return Err(ConfigError::invalid(key, &value.to_string(), "a text, number or flag"));
                }
            };
            this.set(file_key(key), &text)?;
        }
        this.require_master(values.contains_key("master_server_address"))
    }

    /// The settings of the environment, as `MooncakeConfig.load_from_env` reads them: the file that
    /// `MOONCAKE_CONFIG_PATH` names, else the variables `MOONCAKE_*`.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file); `Missing` without `MOONCAKE_MASTER`.
    pub fn from_env(var: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let var = |name: &str| var(name).filter(|value| !value.is_empty());
        if let Some(path) = var("MOONCAKE_CONFIG_PATH") {
            return Self::from_file(Path::new(&path));
        }
        let mut this = Self::for_files();
        (this.local_hostname, this.metadata_server) = ("localhost".into(), "P2PHANDSHAKE".into());
        for (name, key) in [
            ("LOCAL_HOSTNAME", "local_hostname"),
            ("MOONCAKE_LOCAL_HOSTNAME", "local_hostname"),
            ("MOONCAKE_TE_META_DATA_SERVER", "metadata_server"),
            ("MOONCAKE_MASTER", "master_server_addr"),
            ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "global_segment_size"),
            ("MOONCAKE_LOCAL_BUFFER_SIZE", "local_buffer_size"),
            ("MOONCAKE_PROTOCOL", "protocol"),
            ("MOONCAKE_DEVICE", "rdma_devices"),
            ("MOONCAKE_ENABLE_SSD_OFFLOAD", "enable_ssd_offload"),
            ("MOONCAKE_OFFLOAD_ENABLED", "enable_ssd_offload"),
            ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "ssd_offload_path"),
            ("MOONCAKE_TENANT_ID", "tenant_id"),
            ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "enable_client_http_server"),
            ("MOONCAKE_CLIENT_HTTP_PORT", "client_http_port"),
        ] {
            if let Some(value) = var(name) {
                this.set(key, &value)?;
            }
        }
        if var("MOONCAKE_MASTER").is_none() {
            return Err(ConfigError::Missing { key: "MOONCAKE_MASTER" });
        }
        this.require_master(true)
    }

    /// Checks what `setup` checks before anything is opened.
    ///
    /// # Errors
    /// `Missing` for `local_hostname` and `metadata_server`; `Invalid` for a size that is too small or too
    /// large.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (key, value) in
            [("local_hostname", &self.local_hostname), ("metadata_server", &self.metadata_server)]
        {
            if value.is_empty() {
                return Err(ConfigError::Missing { key });
            }
        }
        let need = "0, or at least 1024 bytes";
        for (key, size) in
            [("global_segment_size", self.global_segment_size), ("local_buffer_size", self.local_buffer_size)]
        {
            if (1..SIZE_MIN).contains(&size) {
                return Err(ConfigError::invalid(key, &size.to_string(), need));
            }
        }
        if self.local_buffer_size > BUFFER_SIZE_MAX {
            let size = self.local_buffer_size.to_string();
            return Err(ConfigError::invalid("local_buffer_size", &size, "at most 1 TB"));
        }
        Ok(())
    }

    /// The names of the RDMA devices; none: all.
    #[must_use]
    pub fn devices(&self) -> Vec<String> {
        match self.rdma_devices.trim() {
            "auto-discovery" => Vec::new(),
            list => crate::env::device_list(list),
        }
    }

    fn for_files() -> Self {
        Self {
            global_segment_size: FILE_SEGMENT_SIZE,
            local_buffer_size: FILE_BUFFER_SIZE,
            ..Self::default()
        }
    }

    fn require_master(self, given: bool) -> Result<Self, ConfigError> {
        if !given || self.master_server_addr.is_empty() {
            return Err(ConfigError::Missing { key: "master_server_address" });
        }
        self.validate()?;
        Ok(self)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        if value.len() > VALUE_BYTES_MAX {
            return Err(ConfigError::invalid(key, value, "a text of at most 4096 bytes"));
        }
        let flag = || parse_bool(value).ok_or_else(|| ConfigError::invalid(key, value, "true or false"));
        let size =
            || parse_size(value).ok_or_else(|| ConfigError::invalid(key, value, "a size such as 512mb"));
        match key {
            "local_hostname" => self.local_hostname = value.trim().into(),
            "metadata_server" => self.metadata_server = value.trim().into(),
            "global_segment_size" => self.global_segment_size = size()?,
            "local_buffer_size" => self.local_buffer_size = size()?,
            "protocol" => self.protocol = value.trim().into(),
            "rdma_devices" => self.rdma_devices = value.trim().into(),
            "master_server_addr" => self.master_server_addr = value.trim().into(),
            "ipc_socket_path" => self.ipc_socket_path = value.into(),
            "enable_ssd_offload" => self.enable_ssd_offload = flag()?,
            "ssd_offload_path" => self.ssd_offload_path = value.into(),
            "tenant_id" => self.tenant_id = value.into(),
            "enable_client_http_server" => self.enable_client_http_server = flag()?,
            "client_http_port" => {
                let port = value.trim().parse().ok().filter(|port| *port != 0);
                self.client_http_port =
                    port.ok_or_else(|| ConfigError::invalid(key, value, "a port, 1 to 65535"))?;
            }
            _ => log::debug!("the setting `{}` is not one of `setup`: it is ignored", key.escape_debug()),
        }
        Ok(())
    }
}

/// The key of `setup` for a key of the file.
fn file_key(key: &str) -> &str {
    match key {
        "master_server_address" => "master_server_addr",
        "device_name" => "rdma_devices",
        key => key,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const NEEDED: [(&str, &str); 2] = [("local_hostname", "h:1"), ("metadata_server", "P2PHANDSHAKE")];

    fn with(key: &str, value: &str) -> Result<StoreConfig, ConfigError> {
        StoreConfig::from_pairs(NEEDED.into_iter().chain([(key, value)]))
    }

    fn file(text: &str) -> Result<StoreConfig, ConfigError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        StoreConfig::from_file(file.path())
    }

    #[test]
    fn a_dictionary_has_mooncakes_defaults() {
        let config = StoreConfig::from_pairs(NEEDED).unwrap();
        assert_eq!((config.global_segment_size, config.local_buffer_size), (16 << 20, 16 << 20));
        assert_eq!((config.protocol.as_str(), config.client_http_port), ("tcp", 9300));
        assert_eq!(config.tenant_id, "default");
    }

    #[test]
    fn settings_that_are_needed_are_named() {
        for (given, missing) in [(NEEDED[0], "metadata_server"), (NEEDED[1], "local_hostname")] {
            let refused = StoreConfig::from_pairs([given]).map_err(|error| error.to_string());
            assert!(refused.is_err_and(|error| error.contains(missing)));
        }
    }

    #[test]
    fn values_of_another_kind_are_refused_by_key() {
        for (key, bad) in [
            ("global_segment_size", "50%"),
            ("global_segment_size", "-1"),
            ("global_segment_size", "1023"),
            ("local_buffer_size", "2tb"),
            ("enable_ssd_offload", "perhaps"),
            ("client_http_port", "0"),
            ("client_http_port", "65536"),
        ] {
            let refused = with(key, bad).map_err(|error| error.to_string());
            assert!(refused.is_err_and(|error| error.contains(key)), "{key} {bad}");
        }
        assert!(with("tenant_id", &"t".repeat(VALUE_BYTES_MAX + 1)).is_err());
        assert!(with("a key of a later release", "x").is_ok());
        assert_eq!(with("global_segment_size", "0").unwrap().global_segment_size, 0);
    }

    #[test]
    fn a_file_has_its_own_keys_and_defaults() {
        let needed = r#""local_hostname": "h", "metadata_server": "P2PHANDSHAKE""#;
        let config = file(&format!(
            r#"{{{needed}, "master_server_address": "m:1", "device_name": "mlx5_0,mlx5_1", "local_buffer_size": "1.5 gb",
                "client_http_port": 9301, "enable_ssd_offload": true, "ssd_offload_path": null}}"#
        ))
        .unwrap();
        assert_eq!((config.global_segment_size, config.local_buffer_size), (FILE_SEGMENT_SIZE, 3 << 29));
        assert_eq!(config.devices(), ["mlx5_0", "mlx5_1"]);
        assert_eq!((config.client_http_port, config.enable_ssd_offload), (9301, true));
        assert_eq!(
            file(&format!("{{{needed}}}")),
            Err(ConfigError::Missing { key: "master_server_address" })
        );
    }

    #[test]
    fn what_is_not_a_configuration_file_is_refused_with_its_path() {
        for bad in ["", "{", "[]", "1", "\"x\"", "{\"protocol\": []}", "\u{0}"] {
            assert!(file(bad).is_err(), "{bad:?}");
        }
        assert!(file(&" ".repeat(FILE_BYTES_MAX as usize + 1)).is_err());
        let missing = StoreConfig::from_file(Path::new("no/such/file")).map_err(|error| error.to_string());
        assert!(missing.is_err_and(|error| error.contains("no/such/file")));
    }

    #[test]
    fn the_environment_needs_a_master_or_a_file() {
        let of = |set: &[(&str, &str)]| {
            StoreConfig::from_env(|name| {
                set.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[]), Err(ConfigError::Missing { key: "MOONCAKE_MASTER" }));
        let config = of(&[("MOONCAKE_MASTER", "m:1"), ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb")]).unwrap();
        assert_eq!((config.local_hostname.as_str(), config.global_segment_size), ("localhost", 4 << 30));
        assert!(of(&[("MOONCAKE_CONFIG_PATH", "no/such/file"), ("MOONCAKE_MASTER", "m:1")]).is_err());
    }
}
