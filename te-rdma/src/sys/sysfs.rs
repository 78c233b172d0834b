//! Facts about a device that only sysfs reports, below `/sys/class/infiniband`. Safe code; any file may be
//! missing.

use std::fs;
use std::path::{Path, PathBuf};

use crate::sys::verbs::GidKind;

/// The first line of a file.
fn line(path: &Path) -> Option<String> {
    // The kernel's files have one short line; the files of another root may be of any length.
    const BYTES_MAX: usize = 4096;
    let text = fs::read_to_string(path).ok()?;
    let first = text.lines().next()?.trim();
    (first.len() <= BYTES_MAX).then(|| first.to_owned())
}

/// The ports of a device: number, state (`ACTIVE`, `DOWN`, …), whether it is InfiniBand.
pub(super) fn ports(sys: &Path, device: &str) -> Vec<(u8, String, bool)> {
    let dir = sys.join("class/infiniband").join(device).join("ports");
    let Ok(entries) = fs::read_dir(&dir) else { return Vec::new() };
    let mut ports: Vec<_> = entries
        .filter_map(|entry| {
            let number: u8 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let port = dir.join(number.to_string());
            // "4: ACTIVE"
            let state = line(&port.join("state"))?;
            let state = state.split_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned();
            let infiniband = line(&port.join("link_layer")).is_none_or(|layer| layer == "InfiniBand");
            Some((number, state, infiniband))
        })
        .collect();
    ports.sort();
    ports
}

/// NUMA node of a device: its own, or that of a device above it, or (software devices) that of the network
/// device on which it runs.
pub(super) fn numa_node(sys: &Path, device: &str) -> Option<u16> {
    let dir = sys.join("class/infiniband").join(device);
    let own = || node_upwards(sys, &dir.join("device"));
    let under = || {
        let parent = line(&dir.join("parent"))?;
        // A name must not lead out of the directory.
        if parent.contains('/') || parent.contains("..") {
            return None;
        }
        node_upwards(sys, &sys.join("class/net").join(parent).join("device"))
    };
    own().or_else(under)
}

/// The nearest `numa_node` from `device` up to the root; -1: none.
fn node_upwards(sys: &Path, device: &Path) -> Option<u16> {
    let (root, mut dir): (PathBuf, PathBuf) = (sys.canonicalize().ok()?, device.canonicalize().ok()?);
    while dir.starts_with(&root) {
        if let Some(node) = line(&dir.join("numa_node")) {
            return node.parse().ok();
        }
        if !dir.pop() {
            break;
        }
    }
    None
}

/// The kind of an entry of the GID table.
pub(super) fn gid_kind(sys: &Path, device: &str, port: u8, index: u32, infiniband: bool) -> Option<GidKind> {
    let file =
        sys.join("class/infiniband").join(device).join(format!("ports/{port}/gid_attrs/types/{index}"));
    match line(&file)?.as_str() {
        "RoCE v2" => Some(GidKind::RoceV2),
        "IB/RoCE v1" if infiniband => Some(GidKind::Infiniband),
        "IB/RoCE v1" => Some(GidKind::RoceV1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn ports_nodes_and_kinds_are_read() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path();
        put(sys, "devices/pci0/0000:17:00.0/numa_node", "1\n");
        put(sys, "devices/pci0/0000:17:00.0/virtio3/name", "");
        put(sys, "devices/pci0/0000:18:00.0/numa_node", "-1\n");
        let ib = "class/infiniband";
        put(sys, &format!("{ib}/mlx5_0/ports/2/state"), "1: DOWN\n");
        put(sys, &format!("{ib}/mlx5_0/ports/1/state"), "4: ACTIVE\n");
        put(sys, &format!("{ib}/mlx5_0/ports/1/link_layer"), "Ethernet\n");
        put(sys, &format!("{ib}/mlx5_0/ports/junk/state"), "4: ACTIVE\n");
        put(sys, &format!("{ib}/mlx5_0/ports/1/gid_attrs/types/3"), "RoCE v2\n");
        put(sys, &format!("{ib}/mlx5_0/ports/1/gid_attrs/types/2"), "IB/RoCE v1\n");
        put(sys, &format!("{ib}/rxe0/parent"), "eth0\n");
        put(sys, &format!("{ib}/bad/parent"), "../../devices\n");
        put(sys, &format!("{ib}/none/node_desc"), "\n");
        put(sys, "class/net/eth0/address", "\n");
        let link = |to: &str, at: &str| std::os::unix::fs::symlink(sys.join(to), sys.join(at)).unwrap();
        link("devices/pci0/0000:17:00.0", &format!("{ib}/mlx5_0/device"));
        link("devices/pci0/0000:17:00.0/virtio3", "class/net/eth0/device");
        link("devices/pci0/0000:18:00.0", &format!("{ib}/none/device"));

        let expected = [(1, "ACTIVE".to_owned(), false), (2, "DOWN".to_owned(), true)];
        assert_eq!(ports(sys, "mlx5_0"), expected);
        assert_eq!(ports(sys, "absent"), []);
        assert_eq!(numa_node(sys, "mlx5_0"), Some(1));
        assert_eq!(numa_node(sys, "rxe0"), Some(1), "that of the network device below it");
        assert_eq!(numa_node(sys, "none"), None);
        assert_eq!(numa_node(sys, "bad"), None);
        assert_eq!(gid_kind(sys, "mlx5_0", 1, 3, false), Some(GidKind::RoceV2));
        assert_eq!(gid_kind(sys, "mlx5_0", 1, 2, false), Some(GidKind::RoceV1));
        assert_eq!(gid_kind(sys, "mlx5_0", 1, 2, true), Some(GidKind::Infiniband));
        assert_eq!(gid_kind(sys, "mlx5_0", 1, 9, false), None);
    }
}
