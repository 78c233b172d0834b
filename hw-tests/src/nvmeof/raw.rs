//! A host that sends one command at a time, and does what our transport never does.

use anyhow::{Context as _, Result, bail, ensure};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use te_nvmeof::command::{
    CC_ENABLE, CC_ENABLED, CONTROLLER_ANY, CSTS_READY, Cqe, Place, Sqe, Status, admin, connect_data, io,
    property,
};
use te_nvmeof::identify::{IDENTIFY_BYTES, cns, identity_of};
use te_nvmeof::pdu::{self, Agreed, Data, End, Kind, Pdu, Step};
use zerocopy::IntoBytes as _;

const PATIENCE: Duration = Duration::from_secs(20);
const HOST_ID: [u8; 16] = [0x5e; 16];
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:5e5e5e5e-5e5e-5e5e-5e5e-5e5e5e5e5e5e";

/// A controller of a target, with one I/O queue.
pub(crate) struct RawHost {
    admin: Queue,
    io: Queue,
}

struct Queue {
    stream: TcpStream,
    bytes: Vec<u8>,
    cid: u16,
}

impl RawHost {
    /// Connects an admin queue and an I/O queue.
    ///
    /// # Errors
    /// When the target does not answer, or refuses.
    pub(crate) fn connect(address: SocketAddr, nqn: &str) -> Result<Self> {
        let mut admin = Queue::open(address)?;
        let id = admin.connect(0, CONTROLLER_ANY, nqn)?.result.get() as u16;
        admin.command(Sqe::property_set(0, property::CC, CC_ENABLED), &[])?;
        let queues = Sqe::new(admin::SET_FEATURES, 0, 0).with_dwords(&[7, 0]);
        admin.command(queues, &[])?;
        let mut io = Queue::open(address)?;
        io.connect(1, id, nqn)?;
        Ok(Self { admin, io })
    }

    /// The NGUID or the UUID of a namespace.
    ///
    /// # Errors
    /// When there is no such namespace.
    pub(crate) fn identity(&mut self, nsid: u32) -> Result<[u8; 16]> {
        let sqe = Sqe::new(admin::IDENTIFY, 0, nsid).with_data(Place::Transport(IDENTIFY_BYTES as u32));
        let (_, data) = self.admin.command(sqe.with_dwords(&[cns::DESCRIPTORS.into()]), &[])?;
        let data = data.as_slice().try_into().context("the list of descriptors is cut")?;
        identity_of(data).context("the namespace has neither NGUID nor UUID")
    }

    /// Sends a WRITE with its data, and does not wait for the response.
    ///
    /// # Errors
    /// When the connection is broken.
    pub(crate) fn begin_write(&mut self, nsid: u32, lba: u64, blocks: u32, data: &[u8]) -> Result<()> {
        let sqe = Sqe::blocks(io::WRITE, 0, nsid, lba, blocks);
        self.io.send(sqe.with_data(Place::InCapsule(data.len() as u32)), data)?;
        Ok(())
    }

    /// Disables the controller (F3); returns how long it took to report CSTS.RDY = 0.
    ///
    /// # Errors
    /// When the target does not answer, or the controller stays ready.
    pub(crate) fn disable(&mut self) -> Result<Duration> {
        let began = Instant::now();
        self.admin.command(Sqe::property_set(0, property::CC, CC_ENABLED & !CC_ENABLE), &[])?;
        loop {
            let (cqe, _) = self.admin.command(Sqe::property_get(0, property::CSTS), &[])?;
            if cqe.result.get() as u32 & CSTS_READY == 0 {
                return Ok(began.elapsed());
            }
            ensure!(began.elapsed() < PATIENCE, "the controller stays ready");
        }
    }
}

impl Queue {
    fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE);
        let stream = stream.with_context(|| format!("no target at {address}"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let mut queue = Self { stream, bytes: Vec::new(), cid: 0 };
        queue.stream.write_all(pdu::initialize(Kind::IcReq, 0, (false, false), 0).as_bytes())?;
        match queue.next()? {
            (Pdu::IcResp(_), _) => Ok(queue),
            (other, _) => bail!("the target answers ICReq with {other:?}"),
        }
    }

    fn connect(&mut self, qid: u16, controller: u16, nqn: &str) -> Result<Cqe> {
        let data = connect_data(HOST_ID, controller, nqn, HOST_NQN);
        Ok(self.command(Sqe::connect(0, qid, 32, 0), data.as_bytes())?.0)
    }

    fn send(&mut self, mut sqe: Sqe, data: &[u8]) -> Result<u16> {
        self.cid += 1;
        sqe.cid.set(self.cid);
        let head = pdu::command(sqe, data.len() as u32, Agreed::default());
        self.stream.write_all(&[head.bytes(), data].concat())?;
        Ok(self.cid)
    }

    /// Sends a command; returns its response and its data.
    fn command(&mut self, sqe: Sqe, data: &[u8]) -> Result<(Cqe, Vec<u8>)> {
        let cid = self.send(sqe, data)?;
        let mut collected = Vec::new();
        loop {
            match self.next()? {
                (Pdu::C2hData(header, _), bytes) => {
                    collected.extend_from_slice(&bytes);
                    if header.common.flags & pdu::FLAG_SUCCESS != 0 {
                        return Ok((Cqe::new(cid, Status::SUCCESS, 0, 0), collected));
                    }
                }
                (Pdu::Response(cqe), _) => {
                    let status = cqe.status();
                    ensure!(cqe.cid.get() == cid, "a response to another command");
                    ensure!(
                        status == Status::SUCCESS,
                        "command {:#04x} ends with {:#05x}",
                        sqe.opcode,
                        status.0
                    );
                    return Ok((cqe, collected));
                }
                (other, _) => bail!("the target sends {other:?}"),
            }
        }
    }

    fn next(&mut self) -> Result<(Pdu, Vec<u8>)> {
        loop {
            let parsed = pdu::parse(&self.bytes, End::Controller, Agreed::default(), 1 << 22)
                .map_err(|fatal| anyhow::anyhow!("the target breaks the protocol: {fatal}"))?;
            if let Step::Frame(pdu, used) = parsed {
                let data = if let Pdu::C2hData(_, data) = pdu { data } else { Data::default() };
                let whole = used + data.len as usize;
                if self.bytes.len() >= whole {
                    let taken: Vec<u8> = self.bytes.drain(..whole).collect();
                    return Ok((pdu, taken[used..].to_vec()));
                }
            }
            let mut more = [0; 4_096];
            match self.stream.read(&mut more).context("the target does not answer")? {
                0 => bail!("the target has closed the connection"),
                count => self.bytes.extend_from_slice(&more[..count]),
            }
        }
    }
}
