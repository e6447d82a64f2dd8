// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"math"
	"math/bits"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// noDevice is the index of a device that no packet comes from: the kernel counts
// them up from 1.
const noDevice = math.MaxInt32

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL (linux/membarrier.h).
const membarrierGlobal = 1

// noCPU is SO_INCOMING_CPU of a socket that has none.
const noCPU = -1

// closeSockets closes sockets that are in no socket map any more, without loss to the
// others at the address.
//
// The kernel looks a packet's group up by way of the first socket of the address in its
// hash chain, for IPv4 the one that was bound last (udp4_lib_lookup2 in net/ipv4/udp.c).
// A socket that closes leaves its group before it leaves the chain (udp_lib_unhash); a
// look-up that comes to it in between finds no group, and no program. It takes that
// socket itself, and the packet is lost, unless another socket behind it matches better.
//
// On a CPU that another socket of the address prefers (preferOn) one does: the sockets
// that close give up their own preference, and once the look-ups that had begun before
// are over, after a grace period of RCU, nothing can be lost there.
//
// Groups may have fewer workers than the machine has CPUs. For the others the socket
// gets out of the way before it closes: bound to a device that does not exist it matches
// no packet. That makes the loss rare and does not exclude it, since the kernel takes it
// out of its group in the same call, while a look-up may be between matching it and
// asking for its group. With sockets that were bound and closed without a pause beside
// the group's, under 150,000 packets/s over loopback on two CPUs and Linux 6.18, it lost
// one packet in 75 when they just closed, 42 of 2.3 million when they were hidden first,
// and none of 2.2 million where each CPU was preferred.
//
// A socket of Options.Device cannot be bound to another device without CAP_NET_RAW; it
// is closed as it is.
//
// A TCP listener that closes keeps its group until nobody can find it
// (reuseport_stop_listen_sock in net/core/sock_reuseport.c): it is just closed.
func closeSockets(sockets ...socket) error {
	giveUpPreference(sockets...)
	err := hide(sockets...)
	return errors.Join(err, closeAll(sockets...))
}

// giveUpPreference is the first step of closing sockets; they may still be in the map.
func giveUpPreference(sockets ...socket) {
	preferred := false
	for _, s := range sockets {
		if isTCP(s) {
			continue
		}
		_ = rawconn.Of(s, func(fd int) error {
			cpu, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_INCOMING_CPU)
			if err != nil || cpu == noCPU {
				return err
			}
			preferred = true
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_INCOMING_CPU, noCPU)
		})
	}
	if preferred {
		awaitReaders()
	}
}

// hide is the second step. From here on nothing is received and nothing can be sent, and
// the preflight of others overlooks the sockets. TCP listeners are closed.
func hide(sockets ...socket) error {
	var errs []error
	for _, s := range sockets {
		if isTCP(s) {
			errs = append(errs, closeAll(s))
			continue
		}
		_ = rawconn.Of(s, func(fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, noDevice)
		})
	}
	return errors.Join(errs...)
}

func isTCP(s socket) bool {
	_, ok := s.(*net.TCPListener)
	return ok
}

func closeAll(sockets ...socket) error {
	var errs []error
	for _, s := range sockets {
		if err := s.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// preferOn makes a socket the kernel's best match for packets that a CPU handles. While
// the first socket of the address has its group, that changes nothing: the program is
// asked. See closeSockets for when it has none. A kernel that refuses it is no worse off
// than without.
func preferOn(s socket, cpu int) {
	if isTCP(s) {
		return
	}
	_ = rawconn.Of(s, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_INCOMING_CPU, cpu)
	})
}

// cpusFor chooses a CPU for each worker: those that this process may run on first.
func cpusFor(workers int) []int {
	var allowed unix.CPUSet
	if unix.SchedGetaffinity(os.Getpid(), &allowed) != nil {
		allowed.Zero()
	}
	var first, others []int
	for cpu := range workers + bits.UintSize*len(allowed) {
		if allowed.IsSet(cpu) {
			first = append(first, cpu)
		} else {
			others = append(others, cpu)
		}
	}
	return append(first, others...)[:workers]
}

// awaitReaders returns when everything in the kernel that was reading under RCU has
// ended. membarrier(2) does that, which a seccomp filter may
// forbid and a kernel with nohz_full CPUs does not have; then some milliseconds, since
// such a reader runs for microseconds.
func awaitReaders() {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(20 * time.Millisecond)
	}
}
