// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// bind makes a listener that nobody passed.
func (h *Handover) bind(network, address string) (acceptor, error) {
	if network != "unix" && network != "unixpacket" {
		l, err := h.opt.ListenConfig.Listen(h.ctx, network, address)
		if err != nil {
			return nil, err
		}
		return l.(acceptor), nil
	}
	return listenUnix(&h.opt.ListenConfig, network, address)
}

// bindPacket makes a datagram socket that nobody passed.
func (h *Handover) bindPacket(network, address string) (conn net.PacketConn, err error) {
	listen := func() (err error) {
		conn, err = h.opt.ListenConfig.ListenPacket(h.ctx, network, address)
		return err
	}
	if network != "unixgram" || address[0] == '@' {
		err = listen()
		return conn, err
	}
	err = underLock(address, func() error {
		if err := removeStale(address, network); err != nil {
			return err
		}
		return listen()
	})
	return conn, err
}

// listenUnix listens on a Unix socket, in the place of a path that a dead
// process left. Closing the listener keeps the path.
func listenUnix(config *net.ListenConfig, network, path string) (l *net.UnixListener, err error) {
	listen := func() error {
		got, err := config.Listen(context.Background(), network, path)
		if err != nil {
			return err
		}
		l = got.(*net.UnixListener)
		l.SetUnlinkOnClose(false)
		return nil
	}
	if path[0] == '@' {
		err = listen()
		return l, err
	}
	err = underLock(path, func() error {
		if err := removeStale(path, network); err != nil {
			return err
		}
		return listen()
	})
	return l, err
}

// underLock runs f with a lock on the folder of the path: between the look at
// what lies there and a change of it nobody else changes it.
func underLock(path string, f func() error) (err error) {
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	raw, err := folder.SyscallConn()
	if err != nil {
		return err
	}
	var locked error
	if err := raw.Control(func(fd uintptr) {
		for locked = unix.EINTR; locked == unix.EINTR; {
			locked = unix.Flock(int(fd), unix.LOCK_EX)
		}
	}); err != nil {
		return err
	}
	if locked != nil {
		return fmt.Errorf("lock %s: %w", folder.Name(), locked)
	}
	return f()
}

// removeStale removes a socket at which nobody listens. Its caller holds the
// folder's lock.
func removeStale(path, network string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s is no socket (%v); remove it or choose another path", path, info.Mode())
	}
	c, err := net.Dial(network, path)
	switch {
	case err == nil:
		_ = c.Close()
		return fmt.Errorf("another process listens at %s; stop it or choose another path", path)
	case errors.Is(err, unix.ECONNREFUSED):
		return os.Remove(path)
	case errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("%s is a socket of another type; remove it or choose another path", path)
	}
	return err
}

// inode identifies a path, to unlink it only while it is ours.
type inode struct{ dev, ino uint64 }

func inodeOf(path string) (inode, bool) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return inode{}, false
	}
	return inode{st.Dev, st.Ino}, true
}

// unlink removes the path if it is still that inode.
func unlink(path string, ours inode) error {
	return underLock(path, func() error {
		if now, ok := inodeOf(path); !ok || now != ours {
			return nil
		}
		return os.Remove(path)
	})
}
