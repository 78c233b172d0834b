//! Which way a group of copies goes. Nothing here calls a driver: numbers come in, a path goes out.
//!
//! Three paths copy between host and device memory. None is the best for all sizes, and where they cross
//! differs between machines:
//!
//! | path | good for | costs |
//! |---|---|---|
//! | [`Loop`](Path::Loop): one copy-engine call per hop | few copies, large ones | a driver call per hop |
//! | [`Batch`](Path::Batch): one copy-engine call for all | many copies of 64 KiB and more | slow below about 28 KiB |
//! | [`Kernel`](Path::Kernel): one launch of a small kernel | many small copies | a few of the device's processors |

use core::fmt;
use core::str::FromStr;

use te_core::device::HopDirection;

/// A way to copy a group of hops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// A copy-engine call for each hop.
    Loop,
    /// One copy-engine call for all hops.
    Batch,
    /// A kernel.
    Kernel,
}

impl Path {
    /// All paths.
    pub const ALL: [Self; 3] = [Self::Loop, Self::Batch, Self::Kernel];

    const fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Batch => "batch",
            Self::Kernel => "kernel",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The sizes of hops for which the table has rows, bytes. A hop belongs to the row that is nearest by factor.
pub const SIZES: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// The numbers of hops for which the table has columns.
pub const COUNTS: [u32; 3] = [8, 64, 512];
/// Groups of at most this many hops go one by one.
pub const LOOP_MAX: u32 = 4;
/// Hops of this length and more are *large*: they are grouped apart from smaller ones.
pub const LARGE_BYTES: u32 = 64 << 10;

/// The paths that a device has besides [`Path::Loop`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// The driver has the batch call.
    pub batch: bool,
    /// The kernel was loaded, and copied what it should.
    pub kernel: bool,
}

impl Offer {
    /// Whether the device has this path.
    #[must_use]
    pub const fn has(self, path: Path) -> bool {
        match path {
            Path::Loop => true,
            Path::Batch => self.batch,
            Path::Kernel => self.kernel,
        }
    }
}

/// The best path for each direction, size and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathTable([[[Path; COUNTS.len()]; SIZES.len()]; 2]);

impl Default for PathTable {
    /// The kernel for small hops, batches for large ones.
    fn default() -> Self {
        let row = |bytes| if bytes < LARGE_BYTES { Path::Kernel } else { Path::Batch };
        Self([SIZES.map(|bytes| [row(bytes); COUNTS.len()]); 2])
    }
}

impl PathTable {
    /// The path in a cell: `size` and `count` are indexes into [`SIZES`] and [`COUNTS`].
    #[must_use]
    pub fn cell(&self, direction: HopDirection, size: usize, count: usize) -> Path {
        self.0[at(direction)][size.min(SIZES.len() - 1)][count.min(COUNTS.len() - 1)]
    }

    /// Whether a cell has this path.
    #[must_use]
    pub fn uses(&self, path: Path) -> bool {
        self.0.iter().flatten().flatten().any(|cell| *cell == path)
    }

    /// Replaces the path in a cell; the indexes are those of [`cell`](Self::cell).
    pub fn set(&mut self, direction: HopDirection, size: usize, count: usize, path: Path) {
        self.0[at(direction)][size.min(SIZES.len() - 1)][count.min(COUNTS.len() - 1)] = path;
    }
}

const fn at(direction: HopDirection) -> usize {
    match direction {
        HopDirection::ToDevice => 0,
        HopDirection::ToHost => 1,
    }
}

const DIRECTIONS: [(HopDirection, &str); 2] =
    [(HopDirection::ToDevice, "to-device"), (HopDirection::ToHost, "to-host")];

/// Writes one line per direction and size: `to-device 4096: kernel kernel kernel`, with a path for each count
/// of [`COUNTS`]. [`FromStr`] reads the same; lines may be joined with semicolons, and those that are left
/// out are as in the default table.
impl fmt::Display for PathTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for (direction, name) in DIRECTIONS {
            for (size, bytes) in SIZES.iter().enumerate() {
                write!(f, "{between}{name} {bytes}:")?;
                (0..COUNTS.len())
                    .try_for_each(|count| write!(f, " {}", self.cell(direction, size, count)))?;
                between = "\n";
            }
        }
        Ok(())
    }
}

impl FromStr for PathTable {
    type Err = TableError;

    fn from_str(text: &str) -> Result<Self, TableError> {
        let mut table = Self::default();
        for line in text.split([';', '\n']).map(str::trim).filter(|line| !line.is_empty()) {
            table.read(line).ok_or_else(|| TableError(line.chars().take(TableError::CHARS_MAX).collect()))?;
        }
        Ok(table)
    }
}

impl PathTable {
    fn read(&mut self, line: &str) -> Option<()> {
        let (head, paths) = line.split_once(':')?;
        let (direction, bytes) = head.split_once(' ')?;
        let (direction, _) = DIRECTIONS.into_iter().find(|(_, name)| *name == direction)?;
        let bytes: u32 = bytes.trim().parse().ok()?;
        let size = SIZES.iter().position(|size| *size == bytes)?;
        let mut words = paths.split_whitespace();
        for count in 0..COUNTS.len() {
            let word = words.next()?;
            let path = Path::ALL.into_iter().find(|path| path.name() == word)?;
            self.set(direction, size, count, path);
        }
        words.next().is_none().then_some(())
    }
}

/// A line that is not one of a [`PathTable`]; holds its first 64 characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableError(String);

impl TableError {
    const CHARS_MAX: usize = 64;
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a line of the table: write `to-device 4096: loop batch kernel`, with the direction to-device or \
             to-host, a size of 4096, 16384, 65536 or 262144, and a path for groups of 8, 64 and 512 copies",
            self.0
        )
    }
}

impl core::error::Error for TableError {}

/// Chooses paths for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    table: PathTable,
    offer: Offer,
}

impl Plan {
    /// A plan by this table, for a device with these paths.
    #[must_use]
    pub const fn new(table: PathTable, offer: Offer) -> Self {
        Self { table, offer }
    }

    /// The table; it prints as text that the setting `paths` accepts.
    #[must_use]
    pub const fn table(&self) -> PathTable {
        self.table
    }

    /// The paths that the device has.
    #[must_use]
    pub const fn offer(&self) -> Offer {
        self.offer
    }

    /// The path of a group of `count` hops, which together have `bytes`. The result is a path that the device
    /// has.
    #[must_use]
    pub fn choose(&self, direction: HopDirection, count: u32, bytes: u64) -> Path {
        if count <= LOOP_MAX {
            return Path::Loop;
        }
        let mean = bytes / u64::from(count);
        let path = self.table.cell(direction, nearest(&SIZES, mean), nearest(&COUNTS, count.into()));
        match path {
            path if self.offer.has(path) => path,
            Path::Kernel if self.offer.batch => Path::Batch,
            Path::Batch if self.offer.kernel && mean < u64::from(LARGE_BYTES) => Path::Kernel,
            _ => Path::Loop,
        }
    }
}

/// The index of the step that is nearest to `value` by factor.
fn nearest(steps: &[u32], value: u64) -> usize {
    // Up to the geometric mean of two steps, the lower one.
    let above = |pair: &[u32]| value * value > u64::from(pair[0]) * u64::from(pair[1]);
    // Beyond this, the square would overflow, and the value lies above all steps.
    if value >= 1 << 31 { steps.len() - 1 } else { steps.windows(2).take_while(|pair| above(pair)).count() }
}

#[cfg(test)]
mod tests {
    use te_core::device::HopDirection::{ToDevice, ToHost};

    use super::*;

    const ALL: Offer = Offer { batch: true, kernel: true };

    #[test]
    fn without_measurements_small_hops_go_by_kernel_and_large_ones_by_batch() {
        let plan = Plan::new(PathTable::default(), ALL);
        for (count, bytes, path) in [
            (1, 4_096, Path::Loop),
            (4, 100, Path::Loop),
            (5, 5, Path::Kernel),
            (64, 64 * 4_096, Path::Kernel),
            (100_000, 100_000 * 16_384, Path::Kernel),
            (512, 512 * 65_536, Path::Batch),
            (8, 8 << 30, Path::Batch),
            (8, u64::MAX, Path::Batch),
        ] {
            assert_eq!(plan.choose(ToDevice, count, bytes), path, "{count} hops of {bytes} bytes");
        }
    }

    #[test]
    fn a_path_that_the_device_lacks_is_never_chosen() {
        for offer in [(false, false), (false, true), (true, false), (true, true)] {
            let offer = Offer { batch: offer.0, kernel: offer.1 };
            for path in Path::ALL {
                let mut table = PathTable::default();
                for cell in 0..24 {
                    let direction = if cell < 12 { ToDevice } else { ToHost };
                    table.set(direction, cell / 3 % 4, cell % 3, path);
                }
                let plan = Plan::new(table, offer);
                for (count, bytes) in [(8, 4_096), (64, 64 << 14), (600, 600 << 16), (9, 9 << 20)] {
                    for direction in [ToDevice, ToHost] {
                        let chosen = plan.choose(direction, count, bytes);
                        assert!(offer.has(chosen), "{offer:?} {path} {chosen}");
                        assert!(!offer.has(path) || chosen == path);
                    }
                }
            }
        }
        let kernel = Plan::new(PathTable::default(), Offer { batch: false, kernel: true });
        assert_eq!(kernel.choose(ToHost, 64, 64 << 20), Path::Loop, "large hops do not go by kernel");
    }

    #[test]
    fn cells_are_nearest_by_factor() {
        let sizes = [(0, 0), (8_191, 0), (8_193, 1), (32_768, 1), (32_769, 2), (131_073, 3), (u64::MAX, 3)];
        for (value, index) in sizes {
            assert_eq!(nearest(&SIZES, value), index, "{value}");
        }
        assert_eq!([5, 22, 23, 181, 182, 4_096].map(|count| nearest(&COUNTS, count)), [0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn a_table_is_read_as_it_is_printed() {
        let mut table = PathTable::default();
        table.set(ToHost, 3, 2, Path::Loop);
        table.set(ToDevice, 0, 1, Path::Batch);
        let text = table.to_string();
        assert_eq!(text.lines().count(), 8);
        assert!(text.starts_with("to-device 4096: kernel batch kernel\n"), "{text}");
        assert_eq!(text.parse(), Ok(table));
        assert_eq!(text.replace('\n', "; ").parse(), Ok(table));
        assert_eq!("".parse(), Ok(PathTable::default()));
        assert!(table.uses(Path::Loop) && !PathTable::default().uses(Path::Loop));
    }

    proptest::proptest! {
        /// No text breaks the parser, and what it accepts is printed as text that it reads in the same way.
        #[test]
        fn any_text_is_a_table_or_refused(text in "(to-(device|host) ?(4096|65536|9)?:?( ?(loop|batch|kernel|x)){0,4}[;\n]?|.){0,6}") {
            if let Ok(table) = text.parse::<PathTable>() {
                proptest::prop_assert_eq!(table.to_string().parse(), Ok(table));
            }
        }
    }

    #[test]
    fn what_is_not_a_line_is_refused_with_the_line() {
        for text in [
            "to-device",
            "to-device 4096",
            "to-device 4096:",
            "to-device 4096: loop loop",
            "to-device 4096: loop loop loop loop",
            "to-device 4097: loop loop loop",
            "to-device -1: loop loop loop",
            "sideways 4096: loop loop loop",
            "to-host 4096: loop loop warp",
            ":::",
        ] {
            let error = text.parse::<PathTable>().expect_err(text);
            assert!(error.to_string().starts_with(&format!("{text:?} is not")), "{error}");
        }
        let long = "x".repeat(1_000).parse::<PathTable>().expect_err("no table");
        assert!(long.to_string().len() < 400);
    }
}
