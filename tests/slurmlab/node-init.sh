#!/bin/bash
# First process of a node (pid 1 of its pid namespace). bash reaps orphans. USR1: start slurmd again.
name=$1 cidr=$2 run=@RUN@
hostname "$name"
mount --bind $run/etc/hosts /etc/hosts
mount --bind $run/etc/resolv.conf /etc/resolv.conf
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=1777 local $run/local          # node-local disk
# a /sys that shows this node's network interfaces, with the old cgroup mounts
mkdir -p /dev/shm/cg && mount --rbind /sys/fs/cgroup /dev/shm/cg 2>/dev/null &&
    mount -t sysfs sysfs /sys 2>/dev/null && mount --rbind /dev/shm/cg /sys/fs/cgroup 2>/dev/null
umount -R -l /dev/shm/cg 2>/dev/null; rmdir /dev/shm/cg 2>/dev/null
ip link set lo up
for i in $(seq 500); do                                # the cable arrives from outside
    [ -e /sys/class/net/eth0 ] || ip link show eth0 >/dev/null 2>&1 && break
    sleep 0.02
done
ip addr add "$cidr" dev eth0 && ip link set eth0 up || exit 1
start() { slurmd -D -N "$name" -f $run/etc/slurm.conf & }
trap start USR1
start
sleep infinity & hold=$!
while :; do wait $hold; done
