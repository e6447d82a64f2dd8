// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// queues returns how many bytes wait in the kernel: SIOCINQ and SIOCOUTQ of
// tcp(7). Both are 0 where that cannot be known.
func queues(conn net.Conn) (unread, unsent int) {
	sc, ok := bottom(conn).(syscall.Conn)
	if !ok {
		return 0, 0
	}
	_ = rawconn.Of(sc, func(fd int) error {
		if n, err := unix.IoctlGetInt(fd, unix.SIOCINQ); err == nil {
			unread = n
		}
		if n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ); err == nil {
			unsent = n
		}
		return nil
	})
	return unread, unsent
}
