//! Redis: keys with a time to live, compared and set by scripts, which the server runs atomically.

use std::format;
use std::string::{String, ToString};
use std::time::Duration;

use ::redis::{
    Client, Connection, ConnectionAddr, ErrorKind, FromRedisValue, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, cmd,
};

use crate::backoff::Fault;
use crate::directory::{Backend, Stored};
use crate::entry::ENTRY_BYTES_MAX;
use crate::key_value::Plain;
use crate::source::RedisSource;

/// The first `ARGV[1]` + 1 bytes of the value; nil if the key does not exist.
const GET: &str = "if redis.call('EXISTS', KEYS[1]) == 0 then return false end \
                   return redis.call('GETRANGE', KEYS[1], 0, ARGV[1])";
const SWAP: &str = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end \
                    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) return 1";
const REMOVE: &str = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end \
                      return redis.call('DEL', KEYS[1])";

/// Unless there is a later view. All fields or none: readers take a part of them for an error.
const PUBLISH: &str = "local is = redis.call('HGET', KEYS[1], 'view_version') \
                       if is and tonumber(is) > tonumber(ARGV[2]) then return 0 end \
                       redis.call('HSET', KEYS[1], 'leader_address', ARGV[1], 'view_version', ARGV[2], \
                                  'owner_token', ARGV[3]) \
                       redis.call('PEXPIRE', KEYS[1], ARGV[4]) return 1";

pub(crate) struct Redis {
    source: RedisSource,
    timeout: Duration,
}

impl Redis {
    pub(crate) fn new(source: &RedisSource, timeout: Duration) -> Self {
        Self { source: source.clone(), timeout }
    }

    /// Kind and address of the server.
    pub(crate) fn name(&self) -> String {
        format!("redis at {}", self.source.server)
    }

    /// See [`LeaderView::publish`](crate::LeaderView::publish).
    pub(crate) fn publish_view(
        &self,
        key: &str,
        leader: &str,
        version: u64,
        owner: &str,
        ttl: Duration,
    ) -> Result<bool, Fault> {
        let (version, ttl_ms) = (version.to_string(), ttl.as_millis().to_string());
        let mut command = cmd("EVAL");
        command.arg(PUBLISH).arg(1).arg(key).arg(leader).arg(version).arg(owner).arg(ttl_ms);
        self.query(&command)
    }

    /// The value, or its first `bytes_max` + 1 bytes, so that a longer one is detected.
    fn read(&self, key: &str, bytes_max: usize) -> Result<Option<std::vec::Vec<u8>>, Fault> {
        self.query(cmd("EVAL").arg(GET).arg(1).arg(key).arg(bytes_max))
    }

    fn connect(&self) -> Result<Connection, RedisError> {
        let RedisSource { server, user, password, db } = &self.source;
        let (host, port) = server.rsplit_once(':').unwrap_or((server, ""));
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = ConnectionAddr::Tcp(host.into(), port.parse().unwrap_or(0));
        let mut login = RedisConnectionInfo::default().set_db(i64::from(*db)).set_skip_set_lib_name();
        if !user.is_empty() {
            login = login.set_username(user);
        }
        if !password.is_empty() {
            login = login.set_password(password);
        }
        let client = Client::open(address.into_connection_info()?.set_redis_settings(login))?;
        let connection = client.get_connection_with_timeout(self.timeout)?;
        connection.set_read_timeout(Some(self.timeout))?;
        connection.set_write_timeout(Some(self.timeout))?;
        Ok(connection)
    }

    fn query<T: FromRedisValue>(&self, command: &::redis::Cmd) -> Result<T, Fault> {
        self.connect()
            .and_then(|mut connection| command.query(&mut connection))
            .map_err(|error| fault(&error))
    }
}

impl Backend for Redis {
    fn server(&self) -> String {
        self.name()
    }

    fn get(&self, key: &str) -> Result<Option<Stored>, Fault> {
        Ok(self.read(key, ENTRY_BYTES_MAX)?.map(|value| Stored { value, tag: String::new() }))
    }

    fn swap(&self, key: &str, old: Option<&Stored>, value: &[u8], ttl: Duration) -> Result<bool, Fault> {
        let ttl_ms = ttl.as_millis().to_string();
        match old {
            None => {
                let set: Option<String> =
                    self.query(cmd("SET").arg(key).arg(value).arg("NX").arg("PX").arg(ttl_ms))?;
                Ok(set.is_some())
            }
            Some(old) => {
                self.query(cmd("EVAL").arg(SWAP).arg(1).arg(key).arg(&old.value).arg(value).arg(ttl_ms))
            }
        }
    }

    fn remove(&self, key: &str, old: &Stored) -> Result<bool, Fault> {
        self.query(cmd("EVAL").arg(REMOVE).arg(1).arg(key).arg(&old.value))
    }
}

impl Plain for Redis {
    fn get(&self, key: &str, bytes_max: usize) -> Result<Option<std::vec::Vec<u8>>, Fault> {
        match self.read(key, bytes_max)? {
            Some(value) if value.len() > bytes_max => Err(Fault::Garbage("more bytes than are accepted")),
            found => Ok(found),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), Fault> {
        self.query::<String>(cmd("SET").arg(key).arg(value)).map(|_| ())
    }

    fn delete(&self, key: &str) -> Result<bool, Fault> {
        Ok(self.query::<u64>(cmd("DEL").arg(key))? > 0)
    }
}

fn fault(error: &RedisError) -> Fault {
    let text = error.to_string();
    if error.is_timeout() {
        return Fault::Unreachable("timed out".into());
    }
    if error.is_io_error() || error.is_connection_dropped() {
        return Fault::Unreachable(text);
    }
    match error.kind() {
        _ if text.contains("WRONGTYPE") => Fault::Garbage("a value that is not a string"),
        ErrorKind::AuthenticationFailed => Fault::Refused(format!("{text}: check user and password")),
        _ if text.contains("NOAUTH") => {
            Fault::Refused(format!("{text}: put a user and a password into the connection string"))
        }
        _ => Fault::Refused(text),
    }
}
