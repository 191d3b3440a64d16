#!/bin/sh
# Keeps copies of directories (the last three).
set -eu

usage() {
	echo "usage: backup.sh [-n] [-k COUNT] DIRECTORY..." >&2
	exit 2
}

keep=3
dry=
while getopts "nk:" option; do
	case "$option" in
		n) dry=yes ;;
		k)
			keep=$OPTARG
			;;
		*) usage ;;
	esac
done
shift $((OPTIND - 1))

run() {
	if [ -n "$dry" ]; then
		echo "would: $*"
	else
		"$@"
	fi
}

copy() {
	from=$1
	target="/var/backups/$(basename "$from")-$(date +%Y%m%d)"
	if [ ! -d "$from" ]; then
		echo "no directory $from :(" >&2
		return 1
	fi
	run mkdir -p "$target"
	run cp -a -- "$from/." "$target"
}

prune() {
	ls -d "/var/backups/$1"-* | sort -r | tail -n "+$((keep + 1))" |
		while read -r old; do
			run rm -r -- "$old"
		done
}

[ $# -gt 0 ] || usage
for directory; do
	copy "$directory" && prune "$(basename "$directory")"
done

cat <<END
done: $# directories
1) copied
2) pruned
END
