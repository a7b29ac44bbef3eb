#!/bin/sh
# The machine's process 1 once it has a root: mounts what every system has, runs the jobs, switches off.
# A job's output and the lines that start with "@@ " go to the virtio port "jobs"; see machine.py.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
grep -q " /dev devtmpfs" /proc/mounts || mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm /tmp /media /mnt /home/user /run
mount -t devpts -o ptmxmode=0666,mode=0620 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=0755 tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
ln -sf /proc/self/fd /dev/fd
mount -t ext4 -o ro /dev/vdb /media
chown user:user /home/user
hostname board
ip link set lo up
uname -a

uptime_now() { cut -d ' ' -f 1 /proc/uptime; }

# Runs as $1 (user or root) the shell script $3 for at most $2 seconds; what it leaves behind is ended.
# Sets code, ended (the uptime) and peak (bytes).
as() {
    mkdir /sys/fs/cgroup/job
    sh -c 'echo 0 >/sys/fs/cgroup/job/cgroup.procs
           exec timeout -s KILL "$1" su -l "$2" -c "exec sh $3"' - "$2" "$1" "$3" </dev/null
    code=$?
    ended=$(uptime_now)
    peak=$(cat /sys/fs/cgroup/job/memory.peak)
    echo 1 >/sys/fs/cgroup/job/cgroup.kill
    until rmdir /sys/fs/cgroup/job 2>/dev/null; do usleep 50000; done
}

if grep -q 'machine.shell' /proc/cmdline; then
    echo "files: /media (read-only); log out to switch off"
    cd /home/user
    setsid cttyhack su -l user
else
    dmesg -n 4 # errors still go to the console, to be seen in the log
    exec 3>"$(echo /dev/vport*p1)"
    echo "@@ boot seconds=$(uptime_now) kernel=$(uname -r)" >&3
    while read -r name user limit; do
        mkfifo /run/output
        cat /run/output >&3 &
        echo "@@ begin $name" >&3
        start=$(uptime_now)
        as "$user" "$limit" "/media/jobs/$name.sh" >/run/output 2>&1 3>&-
        wait
        rm /run/output
        seconds=$(echo "$start $ended" | awk '{ printf "%.2f", $2 - $1 }')
        printf '\n@@ end %s code=%s seconds=%s peak=%s\n' "$name" "$code" "$seconds" "$peak" >&3
    done </media/jobs/list
    echo "@@ off" >&3
fi
sync
poweroff -f
