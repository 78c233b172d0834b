#!/bin/busybox sh
# First stage of a lab guest, in the initramfs: loads the modules for access to the host's files, mounts the
# host's root as the guest's, and starts the second stage from the run's directory.
/bin/busybox mkdir -p /proc /sys /dev /host
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
while read -r module; do
    /bin/busybox insmod "/modules/$module" || echo "lab: cannot load $module"
done < /modules/order
die() {
    echo "lab: $*"
    echo o > /proc/sysrq-trigger
    /bin/busybox sleep 60
}
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro host /host || die "the host's root cannot be mounted"
/bin/busybox mount -t proc proc /host/proc
/bin/busybox mount -t sysfs sysfs /host/sys
/bin/busybox mount -t devtmpfs devtmpfs /host/dev
/bin/busybox mkdir -p /host/dev/shm /host/dev/pts
/bin/busybox mount -t devpts devpts /host/dev/pts
/bin/busybox mkdir -p /keep
/bin/busybox mount -o bind /host/tmp /keep
for dir in dev/shm tmp run; do
    /bin/busybox mount -t tmpfs -o mode=1777 tmpfs "/host/$dir"
done
# The project may be under the host's /tmp: directories there stay visible, read-only.
for dir in /keep/*/; do
    name=${dir#/keep/}
    if [ -d "$dir" ] && /bin/busybox mkdir "/host/tmp/$name"; then
        /bin/busybox mount -o bind "$dir" "/host/tmp/$name" || echo "lab: the host's /tmp/$name is not shown"
    fi
done
/bin/busybox umount /keep
/bin/busybox mkdir -p /host/run/lab
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none run /host/run/lab || die "the run's directory cannot be mounted"
/bin/busybox umount /proc /sys /dev
exec /bin/busybox switch_root /host /bin/sh /run/lab/guest.sh
