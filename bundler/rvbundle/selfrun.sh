#!/bin/sh
# rvbundle self-running file: @TITLE@
#
# It runs on Linux, on @ARCHES@, and needs nothing there but sh, dd, gzip, tar, ls, mkdir, rm and uname.
# Say `sh FILE --rvbundle-help` for its options. What follows this script is no text.
#
# The first start on a machine unpacks a small Python into a cache folder, which checks itself against
# digests before it is used; later starts find it there. Everything else is done by that Python.

# shellcheck disable=SC2317 # functions that are called by way of each_place and trap

set -u

size=@SIZE@ # bytes of the whole file

# Set what is known of the bootstrap for a machine: where it lies, in blocks of 4096 bytes; the KiB that it
# takes when unpacked; the SHA-256 of its manifest.
bootstrap_for() {
    case $1 in
@CASES@
    *) return 1 ;;
    esac
}

# die CODE MESSAGE HINT; the codes are those of docs/exit-codes.md.
die() {
    trap - EXIT
    printf 'error: %s\n' "$2" >&2
    [ -z "$3" ] || printf '\nhint: %s\n' "$3" >&2
    exit "$1"
}

# Call $1 with every folder that may be the cache, the best first, until it says yes. As
# rvbundle_runtime.host.cache_place; $own is "" where the folder may belong to others.
each_place() {
    own=yes
    if [ -n "${RVBUNDLE_CACHE-}" ]; then
        own=
        case $RVBUNDLE_CACHE in
        /*) "$1" "$RVBUNDLE_CACHE" ;;
        *) "$1" "$PWD/$RVBUNDLE_CACHE" ;;
        esac
        return
    fi
    case ${XDG_CACHE_HOME-} in
    /*)
        "$1" "$XDG_CACHE_HOME/rvbundle" && return
        ;;
    *)
        case ${HOME-} in
        /*) "$1" "$HOME/.cache/rvbundle" && return ;;
        esac
        ;;
    esac
    user=${user:-$(id -u)}
    for tmp in /var/tmp /tmp; do
        "$1" "$tmp/rvbundle-$user" && return
    done
    return 1
}

# The bootstrap is there, ours, and (as far as the shell can tell) may be executed.
is_ready() {
    base=$1
    boot=$base/bootstrap/$name
    [ -f "$boot/ready" ] && [ -x "$boot/lib/ld.so" ] && { [ -z "$own" ] || [ -O "$base" ]; }
}

# Make a work folder in a place where files can be written and executed; else note why not in $refused.
is_usable() {
    base=$1
    old=$(umask)
    umask 077
    mkdir -p "$base/bootstrap" 2>/dev/null && make_work
    made=$?
    umask "$old"
    if [ -n "$own" ] && [ -e "$base" ] && ! [ -O "$base" ]; then
        refuse "$base belongs to another user"
    elif [ "$made" -ne 0 ]; then
        refuse "$base can't be written"
    else
        # A file without a first line that names an interpreter: where none can be executed (noexec), the
        # kernel says so before it says that this is no program, upon which the shell reads it as a script.
        printf ':\n' >"$work/probe" 2>/dev/null && chmod 700 "$work/probe"
        if ! [ -s "$work/probe" ]; then
            no_space ""
        elif "$work/probe" 2>/dev/null; then
            rm -f "$work/probe"
            return 0
        fi
        refuse "nothing can be executed from $base (is it mounted noexec?)"
    fi
    return 1
}

make_work() {
    number=0
    while work=$base/bootstrap/tmp.$name.$$-$number && ! mkdir "$work" 2>/dev/null; do
        [ -d "$work" ] || return 1 # it is not that a start which was killed has left one of this name
        number=$((number + 1))
    done
}

refuse() {
    clean
    refused="$refused
    $1"
    rmdir "$base/bootstrap" "$base" 2>/dev/null # if they are empty
}

clean() {
    [ -z "$work" ] || rm -rf "$work"
    work=
}

no_space() {
    clean
    die 108 "no space for the bootstrap: $need KiB are needed at $base$1" \
        "free some space, or set RVBUNDLE_CACHE to a folder on another file system"
}

damaged() {
    clean
    die 107 "$self is damaged: $1" "copy the file again from its source"
}

# The size of this file, in bytes: the fifth field of a long listing (POSIX, ls -n).
file_size() {
    set -f
    # shellcheck disable=SC2012,SC2046 # one file, and its fields are wanted
    set -- $(ls -lnL "$self" 2>/dev/null)
    set +f
    printf '%s' "${5-}"
}

# The free KiB at $base; nothing where df says something unexpected.
free_space() {
    df -Pk "$base" 2>/dev/null | {
        read -r _
        read -r _ _ _ free _
        case $free in
        *[!0-9]*) ;;
        *) printf '%s' "$free" ;;
        esac
    }
}

# Take the bootstrap out of this file, into a place of its own, and let it check and install itself.
unpack() {
    for tool in dd gzip tar; do
        command -v $tool >/dev/null ||
            die 110 "this machine has no $tool, which the first start needs" "install it, or busybox"
    done
    there=$(file_size)
    case $there in
    '' | *[!0-9]*) ;; # checked again later
    *)
        [ "$there" -ge $size ] ||
            die 107 "$self is cut short: $there bytes of $size are here" "copy the file again from its source"
        ;;
    esac
    refused=
    trap clean EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    each_place is_usable ||
        die 108 "there is no place for the bootstrap:$refused" "set RVBUNDLE_CACHE to a folder that will do"
    free=$(free_space)
    [ -z "$free" ] || [ "$free" -ge "$need" ] || no_space ", $free KiB are free"
    # LC_ALL: what tar says is looked into. -m and -o: no times, which a board without a clock would find
    # in its future, and no owners.
    said=$({
        dd if="$self" bs=4096 skip="$skip" count="$count" 2>/dev/null | LC_ALL=C gzip -dc |
            LC_ALL=C tar -xmof - -C "$work"
    } 2>&1) || ended=$?
    case $said in
    *'o space left'* | *'uota exceeded'*) no_space "" ;;
    esac
    [ "${ended-0}" -eq 0 ] || damaged "its bootstrap can't be unpacked (${said:-tar failed})"
    code=0
    python "$work" install "$base" "$work" "$manifest" || code=$?
    case $code in
    0) work= ;;
    10[0-9] | 11[0-9]) # it has said why
        clean
        exit $code
        ;;
    *) damaged "its bootstrap does not start here (exit code $code)" ;;
    esac
    trap - EXIT HUP INT TERM
    boot=$base/bootstrap/$name
}

# python FOLDER WORD...: start the bootstrap's Python, which finds its library by its own path. Nothing that
# the caller has set for other programs reaches it (-I; and ld.so's own variables are gone).
python() {
    home=$1
    shift
    "$home/lib/ld.so" --inhibit-cache --argv0 "$home/bin/python3" --library-path "$home/lib" \
        "$home/bin/python3" -I -S -B -X utf8 "$home/start.pyc" "$@"
}

not_executed() {
    die 108 "$boot can't be executed (is it mounted noexec now?)" "set RVBUNDLE_CACHE to another folder"
}

main() {
    case $0 in
    */*) self=$0 ;;
    *)
        self=./$0
        [ -f "$self" ] || self=$(command -v -- "$0") || self=
        ;;
    esac
    if ! [ -f "$self" ] || ! [ -r "$self" ]; then
        die 107 "can't read the file that this was started from ($0)" "start it by its path"
    fi
    machine=$(uname -m)
    bootstrap_for "$machine" ||
        die 110 "$self does not run on this machine ($machine); it has: @NAMES@" \
            "build it for $machine too: rvbundle build --self-running @LIST@,$machine"
    unset LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT LD_DEBUG LD_PROFILE GLIBC_TUNABLES
    work=
    each_place is_ready || unpack
    trap not_executed EXIT # a shell that can't execute ends; some do so without this, but with a message
    exec "$boot/lib/ld.so" --inhibit-cache --argv0 "$boot/bin/python3" --library-path "$boot/lib" \
        "$boot/bin/python3" -I -S -B -X utf8 "$boot/start.pyc" run "$boot" "$self" "$@"
}

# All of the script is read before any of it is done: it does not matter what happens to the file then, and
# a part that is damaged ends it at once.
main "$@"
exit 1
