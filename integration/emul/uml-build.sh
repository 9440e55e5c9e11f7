#!/usr/bin/env bash
# Builds a User Mode Linux kernel with the software RDMA devices rxe and siw, from Debian's kernel source, and prints where
# it is: DIR/linux. A kernel that is there already is only printed. Takes about 4 CPU-minutes and 2 GB of disk, once.
#
#   uml-build.sh [DIR]        DIR is $XDG_CACHE_HOME/larder/uml by default
#
# It installs what is missing with apt-get when it is root. Exit status 69: this machine cannot do it, and the last line
# says why; callers skip what needs the kernel. Any other one but 0 is a fault.
set -euo pipefail

# The packages, each with a file that tells whether it is there. Those of `run` are needed by uml-exec.sh, too.
build=(linux-source-6.1:/usr/src/linux-source-6.1.tar.xz flex:/usr/bin/flex bison:/usr/bin/bison bc:/usr/bin/bc
	make:/usr/bin/make gcc:/usr/bin/gcc libc6-dev:/usr/include/elf.h xz-utils:/usr/bin/xz)
run=(busybox-static:/bin/busybox iproute2:/usr/bin/rdma ibverbs-providers:/etc/libibverbs.d/rxe.driver
	libibverbs-dev:/usr/include/infiniband/verbs.h gcc:/usr/bin/gcc libc6-dev:/usr/include/elf.h)

cannot() {
	echo "no User Mode Linux here: $*" >&2
	exit 69
}

# require PACKAGE:FILE...: installs those whose file is missing.
require() {
	local entry missing=()
	for entry; do [ -e "${entry#*:}" ] || missing+=("${entry%%:*}"); done
	[ ${#missing[@]} -gt 0 ] || return 0
	command -v apt-get >/dev/null || cannot "${missing[*]} missing, and there is no apt-get to install it"
	[ "$(id -u)" -eq 0 ] || cannot "${missing[*]} missing: run apt-get install ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	apt-get install -qy --no-install-recommends "${missing[@]}" >&2 && return 0
	apt-get update -q >&2 || true
	apt-get install -qy --no-install-recommends "${missing[@]}" >&2 || cannot "apt-get does not install ${missing[*]}"
}

# What the tests use beyond x86_64_defconfig. Everything is built in: the guest loads no modules. netem and tbf make slow,
# lossy links; veth and network namespaces several hosts.
enable=(PCI NET INET IPV6 UNIX NET_NS VETH DUMMY NET_SCHED NET_SCH_NETEM NET_SCH_TBF
	HOSTFS DEVTMPFS TMPFS SHMEM MEMFD_CREATE CONFIGFS_FS
	VIRTIO_UML UML_PCI_OVER_VIRTIO INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_USER_MEM INFINIBAND_VIRT_DMA INFINIBAND_ADDR_TRANS
	RDMA_RXE RDMA_SIW LIBCRC32C CRYPTO_CRC32 DEBUG_INFO_NONE)
disable=(MODULES SOUND DEBUG_INFO WIRELESS WLAN BLK_DEV_UBD EXT4_FS BTRFS_FS REISERFS_FS DRM)

compile() {
	local work=$1 flags=() option
	tar -C "$work" -xf /usr/src/linux-source-6.1.tar.xz --strip-components=1
	cd "$work"
	make ARCH=um x86_64_defconfig
	for option in "${enable[@]}"; do flags+=(-e "$option"); done
	for option in "${disable[@]}"; do flags+=(-d "$option"); done
	./scripts/config "${flags[@]}"
	make ARCH=um olddefconfig
	for option in RDMA_RXE RDMA_SIW HOSTFS DUMMY; do # olddefconfig drops what lacks a dependency, and does not say so
		grep -qx "CONFIG_$option=y" .config || { echo "the kernel's configuration has lost $option"; return 1; }
	done
	nice make ARCH=um -j"$(nproc)"
	strip -o linux.stripped linux
}

main() {
	local dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/larder/uml}
	[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || cannot "it runs on Linux on x86-64 only, this is $(uname -sm)"
	require "${run[@]}"
	mkdir -p "$dir"
	dir=$(readlink -f "$dir")
	exec 9>"$dir/lock" # one build at a time; who waits finds its result
	flock 9
	if [ ! -x "$dir/linux" ]; then
		require "${build[@]}"
		local work="$dir/build"
		rm -rf "$work"
		mkdir "$work"
		if ! bash -euo pipefail "$0" --compile "$work" >"$dir/build.log" 2>&1; then # a function in a condition ignores -e
			tail -n 20 "$dir/build.log" >&2
			echo "the kernel was not built: see $dir/build.log" >&2
			exit 1
		fi
		mv "$work/linux.stripped" "$dir/linux" # at once: whoever sees it has all of it
		rm -rf "$work"
	fi
	echo "$dir/linux"
}

if [ "${1:-}" = --compile ]; then compile "$2"; else main "$@"; fi
exit
