#!/usr/bin/env bash
# Runs a program in a User Mode Linux guest with RDMA devices: for `go test -exec`.
#
#   uml-exec.sh PROGRAM [ARGUMENT...]
#
# The guest's root is this machine's, read-only, so that the program finds what it finds here; /dev/shm and /run are the
# guest's own, and TMPDIR is in them. It has rxe0 on dummy0 (10.9.9.1, MTU 9000), one CPU, and no network to anywhere. The
# program's output and status are passed on. Variables whose names begin with LARDER_ or GO are, too.
#
#   UML_KERNEL    the kernel, by default where uml-build.sh puts it
#   UML_MEM       the guest's memory, 1G by default
#   UML_TIMEOUT   seconds, 300 by default, after which the guest is ended
#
# Exit status 69: no guest can be run here, and the last line says why. 124: UML_TIMEOUT. 125: the guest ended without
# having run the program.
set -uo pipefail

here=$(dirname "$(readlink -f "$0")")
kernel=${UML_KERNEL:-${XDG_CACHE_HOME:-$HOME/.cache}/larder/uml/linux}

cannot() {
	echo "no User Mode Linux here: $*" >&2
	exit 69
}

[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ -x "$kernel" ] || cannot "$kernel is missing: run $here/uml-build.sh"
for need in /bin/busybox /usr/bin/rdma /usr/sbin/ip; do
	[ -x "$need" ] || cannot "$need is missing: run $here/uml-build.sh"
done
program=$(command -v "$1") || {
	echo "$1 is not a program" >&2
	exit 127
}
program=$(readlink -f "$program")
shift

job=$(mktemp -d)
guest=
cleanup() {
	if [ -n "$guest" ]; then # timeout passes the signal on, and ends what does not heed it
		kill -TERM "$guest" 2>/dev/null
		wait "$guest"
	fi
	rm -rf "$job"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

{
	printf 'cd %q\n' "$PWD"
	while IFS= read -r name; do
		case $name in LARDER_* | GO*) printf 'export %s=%q\n' "$name" "${!name}" ;; esac
	done < <(compgen -e)
	printf '%q ' exec "$program" "$@"
	echo
} >"$job/command"
: >"$job/output"

# The guest's memory is a file in TMPDIR: on a disk it would be slow. mktemp has been there before.
TMPDIR=/dev/shm timeout -k 2 "${UML_TIMEOUT:-300}" "$kernel" mem="${UML_MEM:-1G}" root=/dev/root rootfstype=hostfs rootflags=/ ro \
	init="$here/uml-init" con=null con0=null,fd:1 umid="larder-$$" uml_dir="$job" hostdir="$job" quiet </dev/null >"$job/console" 2>&1 &
guest=$!
# What the program writes is shown as it comes: a test that hangs has then said where.
tail -q -n +1 -s 0.05 -f --pid="$guest" "$job/output" 2>/dev/null &
shown=$!
wait "$guest"
status=$?
guest=
wait "$shown"
if [ -s "$job/status" ]; then
	status=$(cat "$job/status")
elif [ "$status" -ne 124 ]; then
	tail -n 20 "$job/console" >&2
	if ! grep -q 'Linux version' "$job/console"; then cannot "the kernel does not start"; fi
	status=125
fi
exit "$status"
