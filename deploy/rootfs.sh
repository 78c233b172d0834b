#!/bin/sh
# Assembles the files of the container image: the program, the libraries that it links, and the few files that
# the C library reads. The Dockerfile and `cargo xtask image` both call this script, so the checks run exactly
# what the image contains.
#
#   deploy/rootfs.sh BINARY DIRECTORY
set -eu
[ $# -eq 2 ] || { echo "usage: $0 BINARY DIRECTORY" >&2; exit 2; }
binary=$1 root=$2
[ -x "$binary" ] || { echo "$binary is not a program: build it first" >&2; exit 1; }
[ ! -e "$root" ] || { echo "$root exists already: remove it, or give another directory" >&2; exit 1; }

# Mount points: the container engine mounts /dev, /proc and /sys itself.
mkdir -p "$root/usr/bin" "$root/etc/snowskin" "$root/dev" "$root/proc" "$root/sys" "$root/run/snowskin" "$root/tmp"
chmod 1777 "$root/tmp"

cp "$binary" "$root/usr/bin/snowskin"
# Function names are kept for backtraces. Without binutils the image works, but is larger.
if command -v strip >/dev/null 2>&1; then strip --strip-debug "$root/usr/bin/snowskin"; fi
chmod 0755 "$root/usr/bin/snowskin"

# `ldd` prints `name => path (address)`, or `path (address)` for the loader; the vDSO has no path. A missing
# library is an error.
libraries=$(ldd "$binary")
case $libraries in
*"not found"*) echo "a library is missing: $libraries" >&2; exit 1 ;;
esac
for library in $(echo "$libraries" | sed -n 's/^[[:space:]]*\([^ ]* => \)\{0,1\}\(\/[^ ]*\) (.*$/\2/p'); do
    mkdir -p "$root$(dirname "$library")"
    # The file that the link points to, under the name that the loader looks for.
    cp -L "$library" "$root$library"
    chmod 0755 "$root$library"
done

# The names of the user that the program runs as, and the sources of host names: /etc/hosts first, which the
# engine writes.
printf 'root:x:0:0::/:/none\nsnowskin:x:65532:65532::/run/snowskin:/none\n' >"$root/etc/passwd"
printf 'root:x:0:\nsnowskin:x:65532:\n' >"$root/etc/group"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
chmod 0644 "$root/etc/passwd" "$root/etc/group" "$root/etc/nsswitch.conf"
# The user of the image creates sockets for clients on the same host here.
if [ "$(id -u)" -eq 0 ]; then chown 65532:65532 "$root/run/snowskin"; fi
