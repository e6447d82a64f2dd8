// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"math"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// noDevice is the index of a device that no packet comes from: the kernel counts
// them up from 1.
const noDevice = math.MaxInt32

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL (linux/membarrier.h).
const membarrierGlobal = 1

// closeSockets closes sockets that are in no socket map any more, without loss to the
// others at the address.
//
// The kernel looks a packet's group up by way of the first socket of the address in its
// hash chain, for IPv4 the one that was bound last (udp4_lib_lookup2 in net/ipv4/udp.c).
// A socket that closes leaves its group before it leaves the chain (udp_lib_unhash); a
// packet that finds it in between knows no group, is given to that socket, and is lost.
// So it first gets out of the way: bound to a device that does not exist it matches no
// packet. Look-ups that had begun before are over after a grace period of RCU.
//
// A socket of Options.Device cannot be bound to another device without CAP_NET_RAW; it
// is closed as it is.
func closeSockets(conns ...*net.UDPConn) error {
	hidden := false
	for _, c := range conns {
		hidden = rawconn.Of(c, func(fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, noDevice)
		}) == nil || hidden
	}
	if hidden {
		awaitReaders()
	}
	var errs []error
	for _, c := range conns {
		if err := c.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
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
