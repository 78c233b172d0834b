//! `snowskin disk bench`: how fast a disk takes and gives objects.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::Serialize;
use store_client::disk::{
    AlignedBuffer, Demote, DiskEvent, DiskFile, DiskOptions, DiskService, DriverKind, Lent, Stage, image_of,
    is_intact,
};
use store_core::disk::format::Stream;

use super::{DiskArg, PATIENCE, failure, ready};
use crate::content::mix;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::histogram::Histogram;
use crate::output::{self, Align, LiveTable, figure, rounded, thousands};
use crate::progress::Bar;
use crate::size::{ByteSize, GIB};
use crate::{Outcome, fail, sys};

/// Bytes of objects that wait to be written at a time.
const WINDOW_BYTES: u64 = 64 << 20;

const AFTER_HELP: &str =
    "Objects are written through the disk's own queue, in batches and with its syncs, from memory that is \
    aligned as the store's is; then they are read in random order, as many at a time as --depth says. Reads are \
    not verified unless --verify is given: in service the reader does that, elsewhere. Latencies are those that a \
    node sees, queueing included. What was on the disk is overwritten.

Examples:
  snowskin disk format ./disk --size 8GiB && snowskin disk bench ./disk
  snowskin disk bench ./disk --value 64KiB --depth 1,8,32 --yes --json";

/// Measure writes and reads of a disk
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    #[command(flatten)]
    disk: DiskArg,
    /// Lengths of objects, 4KiB or more.
    #[arg(long, value_delimiter = ',', default_value = "64KiB,1MiB", value_name = "SIZE,…")]
    value: Vec<ByteSize>,
    /// Reads at a time.
    #[arg(long, value_delimiter = ',', default_value = "32", value_name = "N,…", value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: Vec<u32>,
    /// Bytes of objects to write for each length. Default: a quarter of the disk, at most 4GiB.
    #[arg(long, value_name = "SIZE")]
    bytes: Option<ByteSize>,
    /// Seconds of reading for each row.
    #[arg(long, default_value_t = 3.0, value_name = "S")]
    duration: f64,
    /// Verify the checksum of every object that is read.
    #[arg(long)]
    verify: bool,
    /// What carries out the operations: io_uring where it is available, or threads.
    #[arg(long, default_value = "best", value_name = "NAME", value_parser = ["best", "threads"])]
    driver: String,
    /// Overwrite a disk that has objects.
    #[arg(long)]
    yes: bool,
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    op: &'static str,
    driver: &'static str,
    value_bytes: u64,
    depth: u32,
    objects: u64,
    bytes: u64,
    seconds: f64,
    gib_s: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_s_per_gib: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_amplification: Option<f64>,
}

/// An object on the disk.
#[derive(Clone, Copy)]
struct Place {
    locator: u64,
    len: u64,
    crc32c: u32,
}

struct Bench {
    disk: DiskService,
    places: Vec<Place>,
    extent_bytes: u64,
    next: u64,
}

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    sys::catch_interrupts();
    if !(0.01..=3_600.0).contains(&args.duration) {
        return fail(Failure::usage("--duration: 0.01 to 3600 seconds are possible"));
    }
    let path = args.disk.local_path()?;
    let file = DiskFile::open(path, args.disk.caching()).map_err(failure)?;
    let mut bench = open(args, file)?;
    let geometry = bench.disk.stats().geometry;
    let capacity = u64::from(geometry.extents()) * u64::from(geometry.extent_bytes());
    if let Some(value) = args.value.iter().find(|value| geometry.image_bytes(value.bytes()) == 0) {
        let most = ByteSize(geometry.object_bytes_max());
        return fail(Failure::usage(format!("--value {value}: 4KiB to {most} are possible on this disk")));
    }
    let bytes = args.bytes.map_or((capacity / 4).min(4 << 30), ByteSize::bytes);
    let mut rows: Vec<Row> = Vec::new();
    let mut live = LiveTable::new(&[
        ("op", Align::Left),
        ("driver", Align::Left),
        ("value", Align::Right),
        ("depth", Align::Right),
        ("objects", Align::Right),
        ("GiB/s", Align::Right),
        ("p50 µs", Align::Right),
        ("p99 µs", Align::Right),
        ("CPU s/GiB", Align::Right),
        ("written/object byte", Align::Right),
    ]);
    let mut show = |row: Row| {
        if !args.json {
            live.row(&row.cells())?;
        }
        rows.push(row);
        anyhow::Ok(())
    };
    for value in &args.value {
        let bar = Bar::spinner(format!("writing objects of {value}"), global.quiet || args.json);
        let row = bench.write(value.bytes(), bytes)?;
        drop(bar);
        show(row)?;
        for depth in &args.depth {
            if let Some(exit) = sys::interrupted() {
                return Ok(exit);
            }
            let bar = Bar::spinner(format!("reading objects of {value}"), global.quiet || args.json);
            let row = bench.read(value.bytes(), *depth, args)?;
            drop(bar);
            show(row)?;
        }
    }
    if args.json {
        output::print_json(&rows)?;
    }
    match bench.disk.close(PATIENCE) {
        true => Ok(sys::interrupted().unwrap_or(Exit::Ok)),
        false => {
            fail(Failure::failed(format!("{}: the disk could not be synced at the end", path.display())))
        }
    }
}

fn open(args: &Args, file: DiskFile) -> anyhow::Result<Bench> {
    let mut options = DiskOptions::default();
    options.queue_depth = args.depth.iter().copied().max().unwrap_or(32);
    if args.driver == "threads" {
        options.driver = DriverKind::Threads;
    }
    let path = args.disk.path();
    let disk = DiskService::open(file, options, 0).map_err(failure)?;
    let mut objects = 0;
    ready(&disk, path, |event| {
        if let DiskEvent::Adopt { objects: found, .. } = event {
            objects += found.len();
        }
    })?;
    if objects > 0 && !args.yes {
        let text = format!("{}: the disk has {} objects", path.display(), thousands(objects as u64));
        return fail(Failure::failed(text).hint("--yes overwrites them"));
    }
    let extent_bytes = u64::from(disk.stats().geometry.extent_bytes());
    Ok(Bench { disk, places: Vec::new(), extent_bytes, next: 1 })
}

impl Bench {
    /// The next event that is not about an extent that is given up.
    fn event(&mut self) -> anyhow::Result<DiskEvent> {
        loop {
            match self.disk.wait_event(PATIENCE) {
                Some(DiskEvent::Reclaim { sequence }) => {
                    let extent_bytes = self.extent_bytes;
                    self.places.retain(|place| place.locator / extent_bytes != sequence);
                    self.disk.reclaimed(sequence)?;
                }
                Some(DiskEvent::Stopped(why)) => return fail(Failure::failed(why.to_string())),
                Some(event) => return Ok(event),
                None => return fail(Failure::failed("the disk does not answer")),
            }
        }
    }

    /// Writes objects of `len` bytes, `bytes` together.
    fn write(&mut self, len: u64, bytes: u64) -> anyhow::Result<Row> {
        let wanted = bytes.div_ceil(len).max(1);
        let window = (WINDOW_BYTES / len).clamp(2, 2_048).min(wanted);
        let mut sources: Vec<(u32, Lent)> = (0..window).map(|seed| image_of(&noise(seed, len))).collect();
        let mut sums = HashMap::new();
        let before = self.disk.stats().counters;
        let (cpu, start) = (sys::own_cpu(), Instant::now());
        let (mut latency, mut sent, mut ended) = (Histogram::new(), 0, 0);
        while ended < wanted {
            while sent < wanted
                && let Some((crc32c, source)) = sources.pop()
            {
                let id = self.next;
                self.next += 1;
                sent += 1;
                sums.insert(id, (crc32c, Instant::now()));
                let key = format!("bench/{id}").into_bytes().into();
                let stream = Stream::Trial;
                self.disk.demote(Demote {
                    id,
                    tenant: 0,
                    key,
                    generation: id,
                    len,
                    crc32c,
                    stream,
                    source,
                })?;
            }
            match self.event()? {
                DiskEvent::Demoted { id, locator, source } => {
                    let Some((crc32c, at)) = sums.remove(&id) else { continue };
                    latency.record_ns(nanos(at.elapsed()));
                    sources.push((crc32c, source));
                    self.places.push(Place { locator, len, crc32c });
                    ended += 1;
                }
                DiskEvent::DemoteFailed { why, .. } => return fail(Failure::failed(why.to_string())),
                _ => {}
            }
            if sys::interrupted().is_some() {
                break;
            }
        }
        let took = start.elapsed();
        let cpu = sys::own_cpu() - cpu;
        // Headers of the last batch count when it is written.
        let mut after = self.disk.stats().counters;
        let end = Instant::now() + Duration::from_secs(1);
        while after.object_bytes_total - before.object_bytes_total < ended * len && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
            after = self.disk.stats().counters;
        }
        let objects = after.object_bytes_total - before.object_bytes_total;
        let rest = (after.pad_bytes_total + after.header_bytes_total)
            - (before.pad_bytes_total + before.header_bytes_total);
        let amplification = (objects + rest) as f64 / objects.max(1) as f64;
        let mut row = self.row(("demote", len, 0), ended, took, cpu, &latency);
        row.write_amplification = Some(rounded(amplification));
        Ok(row)
    }

    /// Reads random objects of `len` bytes, `depth` at a time.
    fn read(&mut self, len: u64, depth: u32, args: &Args) -> anyhow::Result<Row> {
        let places: Vec<Place> = self.places.iter().copied().filter(|place| place.len == len).collect();
        if places.is_empty() {
            return fail(Failure::failed("no object of this length is left on the disk: use a larger disk"));
        }
        let image = self.disk.stats().geometry.image_bytes(len) as usize;
        let mut buffers: Vec<Lent> = (0..depth).map(|_| Lent::buffer(AlignedBuffer::new(image))).collect();
        let mut asked: HashMap<u64, (Place, Instant)> = HashMap::new();
        let duration = Duration::from_secs_f64(args.duration);
        let (cpu, start) = (sys::own_cpu(), Instant::now());
        let (mut latency, mut objects) = (Histogram::new(), 0);
        loop {
            let over = start.elapsed() >= duration || sys::interrupted().is_some();
            while !over && let Some(buffer) = buffers.pop() {
                let id = self.next;
                self.next += 1;
                let place = places[(mix(id) % places.len() as u64) as usize];
                let at = Instant::now();
                asked.insert(id, (place, at));
                let (locator, deadline) = (place.locator, at + PATIENCE);
                self.disk.stage(Stage { id, locator, len, deadline, buffer })?;
            }
            if asked.is_empty() {
                break;
            }
            match self.event()? {
                DiskEvent::Staged { id, buffer } => {
                    let Some((place, at)) = asked.remove(&id) else { continue };
                    latency.record_ns(nanos(at.elapsed()));
                    objects += 1;
                    buffers.push(checked(buffer, place, args.verify)?);
                }
                DiskEvent::ReadFailed { why, .. } => return fail(Failure::failed(why.to_string())),
                _ => {}
            }
        }
        let (took, cpu) = (start.elapsed(), sys::own_cpu() - cpu);
        Ok(self.row(("stage", len, depth), objects, took, cpu, &latency))
    }

    fn row(
        &self,
        (op, value_bytes, depth): (&'static str, u64, u32),
        objects: u64,
        took: Duration,
        cpu: Duration,
        latency: &Histogram,
    ) -> Row {
        let bytes = objects * value_bytes;
        let gib = bytes as f64 / GIB;
        Row {
            op,
            driver: self.disk.stats().driver,
            value_bytes,
            depth,
            objects,
            bytes,
            seconds: rounded(took.as_secs_f64()),
            gib_s: rounded(gib / took.as_secs_f64()),
            p50_us: rounded(latency.quantile_us(0.5)),
            p99_us: rounded(latency.quantile_us(0.99)),
            cpu_s_per_gib: rounded(if bytes == 0 { 0.0 } else { cpu.as_secs_f64() / gib }),
            write_amplification: None,
        }
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let depth = if self.depth == 0 { "-".to_owned() } else { self.depth.to_string() };
        let amplification = self.write_amplification.map(|it| format!("{it:.4}"));
        vec![
            self.op.to_owned(),
            self.driver.to_owned(),
            ByteSize(self.value_bytes).to_string(),
            depth,
            thousands(self.objects),
            figure(self.gib_s),
            figure(self.p50_us),
            figure(self.p99_us),
            figure(self.cpu_s_per_gib),
            amplification.unwrap_or_default(),
        ]
    }
}

fn checked(buffer: Lent, place: Place, verify: bool) -> anyhow::Result<Lent> {
    if !verify {
        return Ok(buffer);
    }
    match buffer.into_buffer() {
        Some(bytes) if is_intact(&bytes, place.len, place.crc32c) => Ok(Lent::buffer(bytes)),
        _ => {
            Err(Failure::new(Exit::Verification, "an object was read with other bytes than were written")
                .into())
        }
    }
}

/// Bytes that no device can compress.
fn noise(seed: u64, len: u64) -> Vec<u8> {
    let words = (0..len.div_ceil(8)).map(|at| mix((seed << 40) ^ at).to_le_bytes());
    let mut bytes: Vec<u8> = words.flatten().collect();
    bytes.truncate(len as usize);
    bytes
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
