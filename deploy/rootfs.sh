#!/bin/sh
# Assembles what the container image holds: the program, the libraries that it links, and the few files that the C library
# looks for. The Dockerfile and `cargo xtask image` both call it, so what the checks run is what the image is.
#
#   deploy/rootfs.sh BINARY DIRECTORY
set -eu
[ $# -eq 2 ] || { echo "usage: $0 BINARY DIRECTORY" >&2; exit 2; }
binary=$1 root=$2
[ -x "$binary" ] || { echo "$binary is not a program: build it first" >&2; exit 1; }
[ ! -e "$root" ] || { echo "$root is there already: remove it, or name another directory" >&2; exit 1; }

# Where things are mounted when it runs: the engine mounts /dev, /proc and /sys itself.
mkdir -p "$root/usr/bin" "$root/etc/snowskin" "$root/dev" "$root/proc" "$root/sys" "$root/run/snowskin" "$root/tmp"
chmod 1777 "$root/tmp"

cp "$binary" "$root/usr/bin/snowskin"
# Function names stay for backtraces. Without binutils the image is larger, and works.
if command -v strip >/dev/null 2>&1; then strip --strip-debug "$root/usr/bin/snowskin"; fi
chmod 0755 "$root/usr/bin/snowskin"

# `ldd` says `name => path (address)`, or `path (address)` for the loader; the vDSO has no path. What is missing ends this.
libraries=$(ldd "$binary")
case $libraries in
*"not found"*) echo "a library is missing: $libraries" >&2; exit 1 ;;
esac
for library in $(echo "$libraries" | sed -n 's/^[[:space:]]*\([^ ]* => \)\{0,1\}\(\/[^ ]*\) (.*$/\2/p'); do
    mkdir -p "$root$(dirname "$library")"
    # The file behind the link, under the name that the loader looks for.
    cp -L "$library" "$root$library"
    chmod 0755 "$root$library"
done

# Names of the user that it runs as, and where host names are looked up: /etc/hosts first, which the engine writes.
printf 'root:x:0:0::/:/none\nsnowskin:x:65532:65532::/run/snowskin:/none\n' >"$root/etc/passwd"
printf 'root:x:0:\nsnowskin:x:65532:\n' >"$root/etc/group"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
chmod 0644 "$root/etc/passwd" "$root/etc/group" "$root/etc/nsswitch.conf"
# Sockets for clients on the same host are made here, by the user that the image runs as.
if [ "$(id -u)" -eq 0 ]; then chown 65532:65532 "$root/run/snowskin"; fi
