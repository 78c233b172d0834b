#!/bin/sh
# Second stage of a lab guest: PID 1 on the host's root (read-only), with fresh /proc, /sys, /dev, /run and /tmp.
# It sets up the devices of the profile, reports them on the virtio port, runs the job and reports its result.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp TMPDIR=/tmp LANG=C.UTF-8
. "/run/lab/env-$(sed -n 's/.*lab\.guest=\([ab]\).*/\1/p' /proc/cmdline)"

load() {
    for module in "$@"; do
        modprobe -C /dev/null -d "$LAB_MODULES" -S "$LAB_KERNEL" "$module" || fail "module $module does not load"
    done
}

say() { echo "lab: $*" >&3; }

# Ends the guest. The host reads everything up to the line with the result, and nothing after it.
verdict() {
    say "verdict $1"
    sleep 1
    echo o > /proc/sysrq-trigger
    sleep 60
}

fail() {
    say "failed: $*"
    verdict 1
}

# Names the network interface to which QEMU gave this MAC address.
name_interface() {
    for dir in /sys/class/net/*; do
        if [ "$(cat "$dir/address")" = "$1" ]; then
            ip link set "${dir##*/}" name "$2" && ip link set "$2" up
            return
        fi
    done
    fail "no network interface has the address $1"
}

# A management network separate from the rails, so that a fault on a rail does not cut off remote control.
setup_management() {
    name_interface "52:54:00:77:09:0$LAB_NUMBER" mgmt
    ip addr add "10.77.9.$LAB_NUMBER/24" dev mgmt
}

# Each rail is its own subnet (10.77.RAIL.GUEST and fd77:RAIL::GUEST) with an emulated RDMA device.
setup_rails() {
    load crc32_generic ib_uverbs rdma_rxe sch_netem
    rail=0
    while [ "$rail" -lt "$LAB_RAILS" ]; do
        name_interface "52:54:00:77:0$rail:0$LAB_NUMBER" "rail$rail"
        # As on real hosts with several rails: a link that goes down keeps its addresses, and only the
        # interface with an address answers ARP requests for it.
        for dir in /proc/sys/net/ipv6/conf/rail$rail; do
            echo 1 > "$dir/keep_addr_on_down"
            echo 0 > "$dir/accept_dad"
        done
        echo 1 > "/proc/sys/net/ipv4/conf/rail$rail/arp_ignore"
        ip addr add "10.77.$rail.$LAB_NUMBER/24" dev "rail$rail"
        ip -6 addr add "fd77:$rail::$LAB_NUMBER/64" dev "rail$rail" nodad
        rdma link add "rxe$rail" type rxe netdev "rail$rail" || fail "rxe$rail cannot be made"
        rail=$((rail + 1))
    done
    [ "$LAB_RAILS" -eq 0 ] || say "$LAB_RAILS rails up (emulated RDMA: soft-RoCE)"
}

# Links the subsystem to a new port: number, transport, rail, service, and what data within commands it takes.
add_port() {
    mkdir "$nvmet/ports/$1"
    echo ipv4 > "$nvmet/ports/$1/addr_adrfam"
    echo "$2" > "$nvmet/ports/$1/addr_trtype"
    echo "10.77.$3.$LAB_NUMBER" > "$nvmet/ports/$1/addr_traddr"
    echo "$4" > "$nvmet/ports/$1/addr_trsvcid"
    [ -z "$5" ] || echo "$5" > "$nvmet/ports/$1/param_inline_data_size"
    ln -s "$subsystem" "$nvmet/ports/$1/subsystems/lab" || fail "nvmet does not listen: $2, rail $3, port $4"
}

# RAM disks as NVMe namespaces, over TCP and RDMA on every rail of guest b: 1 is plain, 2 carries writes out 3 s
# late, 3 has half of its disk and can grow. Port 4422 of rail 0 takes 64 KiB of data within a command.
setup_nvmeof() {
    # nvmet panics when a host asks for digests and there is no crc32c: modules are not loaded on demand here.
    load crc32c_generic nvme-tcp nvme-rdma
    [ "$LAB_GUEST" = b ] || return 0
    load nvmet nvmet-tcp nvmet-rdma dm-mod dm-delay
    modprobe -C /dev/null -d "$LAB_MODULES" -S "$LAB_KERNEL" brd rd_nr=3 rd_size=65536 || fail "module brd does not load"
    make_mapping late "0 $(cat /sys/block/ram1/size) delay /dev/ram1 0 0 /dev/ram1 0 3000"
    make_mapping growing "0 65536 linear /dev/ram2 0"
    mount -t configfs configfs /sys/kernel/config || fail "no configfs"
    nvmet=/sys/kernel/config/nvmet
    subsystem="$nvmet/subsystems/lab"
    mkdir "$subsystem"
    echo 1 > "$subsystem/attr_allow_any_host"
    number=1
    for device in /dev/ram0 /dev/dm-0 /dev/dm-1; do
        mkdir "$subsystem/namespaces/$number"
        echo "$device" > "$subsystem/namespaces/$number/device_path"
        echo 1 > "$subsystem/namespaces/$number/enable" || fail "nvmet does not take $device"
        number=$((number + 1))
    done
    port=1
    rail=0
    while [ "$rail" -lt "$LAB_RAILS" ]; do
        add_port "$port" tcp "$rail" 4420 ""
        add_port "$((port + 1))" rdma "$rail" 4421 ""
        port=$((port + 2))
        rail=$((rail + 1))
    done
    add_port "$port" tcp 0 4422 65536
    say "NVMe over Fabrics target up (emulated: nvmet on RAM disks)"
}

# A device of device-mapper; there is no udev that would have to be waited for.
make_mapping() {
    DM_DISABLE_UDEV=1 dmsetup create "$1" --table "$2" || fail "no device $1"
}

# A CXL region over the emulated memory device, and a devdax namespace on it: /dev/dax*.
setup_cxl() {
    load cxl_acpi cxl_pci cxl_mem cxl_pmem libnvdimm nd_pmem dax_pmem device_dax
    tries=0
    until [ -e /sys/bus/cxl/devices/mem0 ] && [ -e /sys/bus/cxl/devices/decoder0.0 ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 100 ] || fail "no CXL memory device and root decoder, only: $(echo /sys/bus/cxl/devices/*)"
        sleep 0.1
    done
    # Both guests write the same information block to the device that they share, so they take turns.
    until [ "$LAB_GUEST" = a ] || [ -e /run/lab/cxl-a-done ]; do
        sleep 0.2
    done
    cxl create-region -m -d decoder0.0 -w 1 -g 1024 mem0 > /run/lab/cxl-$LAB_GUEST.log 2>&1 || fail "no CXL region: see cxl-$LAB_GUEST.log"
    region=$(ndctl list -R 2>> /run/lab/cxl-$LAB_GUEST.log | sed -n 's/.*"dev":"\(region[0-9]*\)".*/\1/p' | head -n 1)
    ndctl create-namespace -m devdax -r "$region" >> /run/lab/cxl-$LAB_GUEST.log 2>&1 || fail "no devdax namespace: see cxl-$LAB_GUEST.log"
    ls /dev/dax* > /dev/null 2>&1 || fail "no /dev/dax"
    touch "/run/lab/cxl-$LAB_GUEST-done"
    say "CXL memory up (emulated): $(ls /dev/dax*)"
}

# A part of the memory as devdax, at the speed of RAM: /dev/dax*.
setup_dax() {
    load libnvdimm nd_pmem dax_pmem device_dax nd_e820
    tries=0
    until [ -e /sys/bus/nd/devices/namespace0.0 ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 100 ] || fail "no namespace of persistent memory, only: $(echo /sys/bus/nd/devices/*)"
        sleep 0.1
    done
    ndctl create-namespace -f -m devdax -e namespace0.0 > /run/lab/dax-$LAB_GUEST.log 2>&1 || fail "no devdax namespace: see dax-$LAB_GUEST.log"
    ls /dev/dax* > /dev/null 2>&1 || fail "no /dev/dax"
    say "devdax up: $(ls /dev/dax*), $(cat /sys/bus/dax/devices/dax*/size) bytes"
}

# RAM disks, of which device-mapper makes devices that record writes, fail and stall.
setup_disk() {
    load dm-mod dm-log-writes dm-flakey
    modprobe -C /dev/null -d "$LAB_MODULES" -S "$LAB_KERNEL" brd rd_nr=3 rd_size=131072 || fail "module brd does not load"
    [ -b /dev/ram2 ] || fail "no /dev/ram2"
    say "RAM disks up: $(echo /dev/ram*)"
}

load virtio_console
for port in /sys/class/virtio-ports/*; do
    [ "$(cat "$port/name")" = lab ] && exec 3> "/dev/${port##*/}"
done
say "booted"
hostname "lab-$LAB_GUEST"
ip link set lo up
load virtio_net
[ "$LAB_MANAGEMENT" -eq 0 ] || setup_management
setup_rails
for step in $LAB_SETUP; do
    "setup_$step"
done
say "ready"

# The host creates this file when every guest is ready.
until [ -e /run/lab/go ]; do
    sleep 0.2
done
if [ "$LAB_JOB" = shell ]; then
    setsid -c /bin/bash -i < /dev/ttyS0 > /dev/ttyS0 2>&1
    verdict 0
fi
setsid sh "/run/lab/job-$LAB_GUEST.sh" < /dev/null >&3 2>&1 &
job=$!
if [ "$LAB_JOB" = serve ]; then
    # The job serves the other guest until the host creates the stop file. If it ends earlier, its exit code
    # is the result.
    while kill -0 "$job" 2> /dev/null; do
        [ -e /run/lab/stop ] && verdict 0
        sleep 0.2
    done
fi
wait "$job"
verdict "$?"
