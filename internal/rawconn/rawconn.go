// SPDX-License-Identifier: Apache-2.0

// Package rawconn wraps syscall.RawConn: reaching a connection's descriptor without
// taking it, as File and Fd do, which would switch the connection to blocking mode.
package rawconn

import "syscall"

// Control calls f with the descriptor, which stays the connection's and is valid only
// during the call. It returns f's error, or why f was not called.
func Control(c syscall.RawConn, f func(fd int) error) error {
	var failed error
	if err := c.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return err
	}
	return failed
}

// Of does Control on a connection.
func Of(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return Control(raw, f)
}
