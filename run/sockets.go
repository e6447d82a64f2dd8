// SPDX-License-Identifier: Apache-2.0

package run

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/rawconn"
)

// settle is how long a server gets to answer what it read from a UDP socket last, before
// SIGTERM.
const settle = 100 * time.Millisecond

// bound is a Listener that the parent holds: a listening socket, or the group of a UDP
// address.
type bound struct {
	Listener
	socket net.Listener
	group  *dispatch.Group
	// made is the Unix socket's file, which is removed only while it is that.
	made os.FileInfo
}

func (s *Supervisor) bind(l Listener) (*bound, error) {
	b := &bound{Listener: l}
	var err error
	switch {
	case l.isUDP():
		b.group, err = dispatch.Open(dispatch.Options{
			Network: l.Network, Address: l.Address, Steering: l.Steering, Service: s.o.Service, Root: s.o.Root,
			ReceiveBuffer: l.ReceiveBuffer, FlowTimeout: l.FlowTimeout, Logger: s.o.Logger,
		})
	case l.Network == "unix":
		if err = removeStale(l.Address); err == nil {
			b.socket, err = net.Listen(l.Network, l.Address)
		}
		if err == nil && l.Address[0] != '@' {
			b.socket.(*net.UnixListener).SetUnlinkOnClose(false)
			b.made, err = os.Lstat(l.Address)
		}
	default:
		var config net.ListenConfig
		config.SetMultipathTCP(false) // the server expects what it asked for
		b.socket, err = config.Listen(context.Background(), l.Network, l.Address)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listener %q: %w%s", l.Name, err, advice(err)), b.close())
	}
	return b, nil
}

func advice(err error) string {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return "; stop who has it, or choose another address"
	case errors.Is(err, unix.EACCES):
		return "; ports below 1024 need root or CAP_NET_BIND_SERVICE"
	}
	return ""
}

// removeStale removes a Unix socket at which nobody listens.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if path[0] == '@' || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s is no socket; remove it or choose another path", path)
	}
	c, err := net.Dial("unix", path)
	switch {
	case err == nil:
		return errors.Join(fmt.Errorf("another process listens at %s: %w", path, unix.EADDRINUSE), c.Close())
	case errors.Is(err, unix.ECONNREFUSED):
		return os.Remove(path)
	}
	return err
}

func (b *bound) close() error {
	var err error
	if b.group != nil {
		err = b.group.Close()
	}
	if b.socket != nil {
		err = errors.Join(err, b.socket.Close())
	}
	if b.made != nil {
		if now, lerr := os.Lstat(b.Address); lerr == nil && os.SameFile(now, b.made) {
			err = errors.Join(err, os.Remove(b.Address))
		}
	}
	return err
}

// sockets are what one start of the server gets, in the order of the listeners, and the
// UDP generations among it.
type sockets struct {
	bound       []*bound
	generations map[*bound]*dispatch.Generation
	nonBlocking bool
}

// join makes the sockets of a start.
func (s *Supervisor) join() (*sockets, error) {
	set := &sockets{bound: s.bound, generations: map[*bound]*dispatch.Generation{}, nonBlocking: s.o.NonBlocking}
	for _, b := range s.bound {
		if b.group == nil {
			continue
		}
		g, err := b.group.Join(max(1, b.Workers))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listener %q: %w", b.Name, err), set.close())
		}
		set.generations[b] = g
	}
	return set, nil
}

// duplicate returns duplicates for a child and their names.
func (set *sockets) duplicate() (files []*os.File, names []string, err error) {
	add := func(name string, c syscall.Conn) error {
		return rawconn.Of(c, func(fd int) error {
			// The mode belongs to the open file, which all processes share; this one
			// neither accepts nor reads.
			if err := unix.SetNonblock(fd, set.nonBlocking); err != nil {
				return err
			}
			d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
			if err == nil {
				files, names = append(files, os.NewFile(uintptr(d), name)), append(names, name)
			}
			return err
		})
	}
	for _, b := range set.bound {
		if b.socket != nil {
			err = errors.Join(err, add(b.Name, b.socket.(syscall.Conn)))
			continue
		}
		for _, c := range set.generations[b].Conns() {
			err = errors.Join(err, add(b.Name, c))
		}
	}
	if err != nil {
		for _, f := range files {
			_ = f.Close()
		}
		return nil, nil, fmt.Errorf("duplicate sockets: %w", err)
	}
	return files, names, nil
}

// activate makes new UDP flows go to these sockets.
func (set *sockets) activate() error {
	var err error
	for _, g := range set.generations {
		err = errors.Join(err, g.Activate())
	}
	return err
}

// drain waits until the process, which reads on, has nothing to do any more on its UDP
// sockets: they get no new packets when it returns.
func (set *sockets) drain(ctx context.Context, limit time.Duration, final bool) error {
	if len(set.generations) == 0 {
		return nil
	}
	over := make(chan struct{})
	close(over)
	results := make(chan error, len(set.generations))
	for b, g := range set.generations {
		o := dispatch.DrainOptions{Final: final, Deadline: limit}
		if b.Steering == dispatch.SteeringStateless || final {
			o.Done = over
		}
		go func() {
			_, err := g.Drain(ctx, o)
			results <- err
		}()
	}
	var err error
	for range set.generations {
		err = errors.Join(err, <-results)
	}
	timer := time.NewTimer(settle)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return err
}

// close leaves the groups and closes the UDP sockets.
func (set *sockets) close() error {
	var err error
	for _, g := range set.generations {
		err = errors.Join(err, g.Close())
	}
	return err
}
