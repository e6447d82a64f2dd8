// SPDX-License-Identifier: Apache-2.0

package run

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// notifySocket is where servers send what sd_notify(3) sends. Its name is abstract, chosen
// by the kernel: any user can send to it, and a killed parent leaves nothing. The kernel
// vouches for the sender's process number.
type notifySocket struct {
	conn *net.UnixConn
	name string
}

func listenNotify() (*notifySocket, error) {
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: "", Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("make socket for notifications: %w", err)
	}
	err = rawconn.Of(conn, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make socket for notifications: %w", err), conn.Close())
	}
	return &notifySocket{conn, conn.LocalAddr().String()}, nil
}

// serve calls f with the lines of each notification and the process that sent it, until
// the socket is closed.
func (n *notifySocket) serve(f func(pid int, lines []string)) {
	b, oob := make([]byte, 64<<10), make([]byte, 4096)
	for {
		size, oobSize, _, _, err := n.conn.ReadMsgUnix(b, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		if pid := sender(oob[:oobSize]); pid > 0 {
			f(pid, strings.Split(string(b[:size]), "\n"))
		}
	}
}

// sender is the process that the kernel names. Descriptors that came along are closed:
// that is how BARRIER=1 learns that everything before it was read.
func sender(oob []byte) (pid int) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return 0
	}
	for i := range messages {
		if cred, err := unix.ParseUnixCredentials(&messages[i]); err == nil {
			pid = int(cred.Pid)
			continue
		}
		if fds, err := unix.ParseUnixRights(&messages[i]); err == nil {
			for _, fd := range fds {
				_ = unix.Close(fd)
			}
		}
	}
	return pid
}
