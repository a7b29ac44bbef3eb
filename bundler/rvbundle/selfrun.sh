#!/bin/sh
# rvbundle self-running file: @TITLE@
#
# It runs on Linux, on @ARCHES@, and needs
# nothing there but a shell and dd, gzip, tar, ls, chmod, mkdir, rm, uname: busybox will do.
# Say `sh FILE --rvbundle-help` for its options. What follows this script is no text.
#
# The first start on a machine unpacks a small Python into a cache folder, which checks itself against
# digests before it is used; later starts find it there. Everything else is done by that Python.

# shellcheck disable=SC2317 # functions that are called by way of each_place and trap

set -u

# All names begin with rv_: a variable of the caller's that is changed here would be changed for the agent.

rv_size=@SIZE@ # bytes of the whole file

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
# rvbundle_runtime.host.cache_place; $rv_own is "" where the folder may belong to others.
each_place() {
    rv_own=yes
    if [ -n "${RVBUNDLE_CACHE-}" ]; then
        rv_own=
        case $RVBUNDLE_CACHE in
        /*) "$1" "$RVBUNDLE_CACHE" ;;
        *) "$1" "$PWD/$RVBUNDLE_CACHE" ;;
        esac
        return
    fi
    case ${XDG_CACHE_HOME-} in
    /*) "$1" "$XDG_CACHE_HOME/rvbundle" && return ;;
    *)
        case ${HOME-} in
        /*) "$1" "$HOME/.cache/rvbundle" && return ;;
        esac
        ;;
    esac
    rv_user=${rv_user:-$(id -u 2>/dev/null)}
    [ -n "$rv_user" ] || return # no such program: then only a folder of the user's own will do
    for rv_tmp in /var/tmp /tmp; do
        [ -d "$rv_tmp" ] && "$1" "$rv_tmp/rvbundle-$rv_user" && return
    done
    return 1
}

# The bootstrap is there, ours, and (as far as the shell can tell) may be executed.
is_ready() {
    rv_base=$1
    rv_boot=$rv_base/bootstrap/$rv_name
    [ -f "$rv_boot/ready" ] && [ -x "$rv_boot/lib/ld.so" ] && { [ -z "$rv_own" ] || [ -O "$rv_base" ]; }
}

# Make a work folder in a place where files can be written and executed; else note why not in $rv_refused.
is_usable() {
    rv_base=$1
    if [ -n "$rv_own" ] && [ -e "$rv_base" ] && ! [ -O "$rv_base" ]; then
        refuse "$rv_base belongs to another user"
        return 1
    fi
    rv_umask=$(umask)
    umask 077
    rv_said=$(LC_ALL=C mkdir -p "$rv_base/bootstrap" 2>&1) && make_work
    rv_code=$?
    umask "$rv_umask"
    if [ "$rv_code" -ne 0 ]; then
        refuse "$rv_base can't be written${rv_said:+: ${rv_said##*: }}"
        return 1
    fi
    # A file without a first line that names an interpreter: where nothing can be executed (noexec), the
    # kernel says so before it says that this is no program, upon which the shell reads it as a script.
    printf ':\n' 2>/dev/null >"$rv_work/probe" && chmod 700 "$rv_work/probe"
    [ -s "$rv_work/probe" ] || no_space ""
    if ! "$rv_work/probe" 2>/dev/null; then
        refuse "nothing can be executed from $rv_base (is it mounted noexec?)"
        return 1
    fi
    rm -f "$rv_work/probe"
}

make_work() {
    rv_number=0
    while rv_work=$rv_base/bootstrap/tmp.$rv_name.$$-$rv_number && ! mkdir "$rv_work" 2>/dev/null; do
        [ -d "$rv_work" ] || return 1 # else a start that was killed has left one of this name
        rv_number=$((rv_number + 1))
    done
}

refuse() {
    clean
    rv_refused="$rv_refused
    $1"
    rmdir "$rv_base/bootstrap" "$rv_base" 2>/dev/null # if they are empty
}

clean() {
    [ -z "$rv_work" ] || rm -rf "$rv_work"
    rv_work=
    tell ""
}

# Say on a terminal what takes so long; "" takes it back.
tell() {
    [ ! -t 2 ] || printf '\r\033[K%s' "$1" >&2
}

no_space() {
    clean
    die 108 "no space for the bootstrap: $rv_need KiB are needed at $rv_base$1" \
        "free some space, or set RVBUNDLE_CACHE to a folder on another file system"
}

damaged() {
    clean
    die 107 "$rv_self is damaged: $1" "copy the file again from its source"
}

# The size of this file, in bytes: the fifth field of a long listing (POSIX, ls -n).
file_size() {
    set -f
    # shellcheck disable=SC2012,SC2046 # one file, and its fields are wanted
    set -- $(ls -lnL "$rv_self" 2>/dev/null)
    set +f
    printf '%s' "${5-}"
}

# The free KiB at $rv_base; nothing where df says something unexpected.
free_space() {
    df -Pk "$rv_base" 2>/dev/null | {
        read -r _
        read -r _ _ _ rv_free _
        case $rv_free in
        *[!0-9]*) ;;
        *) printf '%s' "$rv_free" ;;
        esac
    }
}

# Take the bootstrap out of this file, into a place of its own, and let it check and install itself.
unpack() {
    for rv_tool in dd gzip tar; do
        command -v "$rv_tool" >/dev/null ||
            die 110 "this machine has no $rv_tool, which the first start needs" "install it, or busybox"
    done
    rv_there=$(file_size)
    case $rv_there in
    '' | *[!0-9]*) ;; # checked again later
    *)
        [ "$rv_there" -ge "$rv_size" ] || die 107 \
            "$rv_self is cut short: $rv_there bytes of $rv_size are here" "copy the file again from its source"
        ;;
    esac
    rv_refused=
    trap clean EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    each_place is_usable || die 108 \
        "there is no place for the bootstrap:$rv_refused" "set RVBUNDLE_CACHE to a folder that will do"
    rv_free=$(free_space)
    [ -z "$rv_free" ] || [ "$rv_free" -ge "$rv_need" ] || no_space ", $rv_free KiB are free"
    tell "rvbundle: first start on this machine, unpacking ..."
    # What tar says is looked into: LC_ALL. -m and -o: no times, which a board without a clock would find
    # in its future, and no owners.
    rv_code=0
    rv_said=$({
        unset TAR_OPTIONS GZIP
        LC_ALL=C
        export LC_ALL
        dd if="$rv_self" bs=4096 skip="$rv_skip" count="$rv_count" 2>/dev/null | gzip -dc |
            tar -xmof - -C "$rv_work"
    } 2>&1) || rv_code=$?
    case $rv_said in
    *'o space left'* | *'uota exceeded'*) no_space "" ;;
    esac
    [ "$rv_code" -eq 0 ] || damaged "its bootstrap can't be unpacked (${rv_said:-tar failed})"
    rv_code=0
    python "$rv_work" install "$rv_base" "$rv_work" "$rv_manifest" || rv_code=$?
    case $rv_code in
    0) rv_work= ;;
    10[0-9] | 11[0-9]) # it has said why
        clean
        exit "$rv_code"
        ;;
    *)
        [ -z "$rv_said" ] || damaged "its bootstrap can't be unpacked ($rv_said)"
        clean
        die 110 "the bootstrap does not start on this machine (exit code $rv_code)" \
            "is its kernel or its processor too old? if not, the file may be damaged: copy it again"
        ;;
    esac
    trap - EXIT HUP INT TERM
    tell ""
    rv_boot=$rv_base/bootstrap/$rv_name
}

# python FOLDER WORD...: start the bootstrap's Python, which finds its library by its own path. Nothing that
# the caller has set for other programs reaches it (-I; and ld.so's own variables are gone).
python() {
    rv_home=$1
    shift
    "$rv_home/lib/ld.so" --inhibit-cache --argv0 "$rv_home/bin/python3" --library-path "$rv_home/lib" \
        "$rv_home/bin/python3" -I -S -B -X utf8 "$rv_home/start.pyc" "$@"
}

not_executed() {
    die 108 "$rv_boot can't be executed (is it mounted noexec now?)" "set RVBUNDLE_CACHE to another folder"
}

main() {
    case $0 in
    */*) rv_self=$0 ;;
    *)
        rv_self=./$0
        [ -f "$rv_self" ] || rv_self=$(command -v -- "$0") || rv_self=
        ;;
    esac
    if ! [ -f "$rv_self" ] || ! [ -r "$rv_self" ]; then
        die 107 "can't read the file that this was started from ($0)" "start it by its path"
    fi
    rv_machine=$(uname -m)
    if ! bootstrap_for "$rv_machine"; then
        case $rv_machine in
        riscv64 | aarch64 | x86_64) rv_hint="build it with --self-running @LIST@,$rv_machine" ;;
        *) rv_hint="such a file can be built for riscv64, aarch64 and x86_64" ;;
        esac
        die 110 "$rv_self does not run on this machine ($rv_machine); it has: @ARCHES@" "$rv_hint"
    fi
    unset LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT LD_DEBUG LD_PROFILE GLIBC_TUNABLES
    rv_work='' rv_user=''
    each_place is_ready || unpack
    trap not_executed EXIT # a shell that can't execute ends; most do so by way of this
    exec "$rv_boot/lib/ld.so" --inhibit-cache --argv0 "$rv_boot/bin/python3" \
        --library-path "$rv_boot/lib" "$rv_boot/bin/python3" -I -S -B -X utf8 \
        "$rv_boot/start.pyc" run "$rv_boot" "$rv_self" "$@"
}

# All of the script is read before any of it is done: it does not matter what happens to the file then, and
# a part that is damaged ends it at once.
main "$@"
exit 1
