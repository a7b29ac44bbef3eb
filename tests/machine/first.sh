#!/bin/busybox sh
# The machine's first program, in the initramfs: loads drivers, then makes the disk the root, as on a board.
# With machine.root=memory on the kernel's command line the initramfs stays the root.
/bin/busybox mkdir -p /bin /sbin /usr/bin /usr/sbin /proc /sys /dev /disk /home
/bin/busybox --install -s
mount -t proc proc /proc
mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do
    insmod "$module" || echo "first.sh: could not load $module"
done
for _ in 1 2 3 4 5 6 7 8 9 10; do
    [ -b /dev/vda ] && break
    sleep 1
done
mount -t ext4 -o noatime /dev/vda /disk || poweroff -f

if grep -q 'machine.root=memory' /proc/cmdline; then
    mkdir /disk/home
    mount --bind /disk/home /home
    exec /sbin/machine
fi
cp -a /bin /sbin /usr /etc /disk/
mkdir -p /disk/proc /disk/sys /disk/dev /disk/tmp /disk/home /disk/root /disk/media /disk/mnt /disk/var
umount /proc
umount /dev
exec switch_root /disk /sbin/machine
