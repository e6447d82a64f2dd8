// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// hasty asks over new connections at a rate, each from one of a few threads that wait in
// the kernel: the client of a benchmark, which leaves the machine to the servers.
func (s *service) hasty(threads, perSecond int) *client {
	c := &client{s: s, stop: make(chan struct{}), by: map[int]int{}}
	server, err := netip.ParseAddrPort(s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	pause := time.Second * time.Duration(threads) / time.Duration(perSecond)
	for i := range threads {
		c.done.Go(func() {
			to := &unix.SockaddrInet4{Port: int(server.Port()), Addr: server.Addr().As4()} // Connect writes to it
			s.ns.Run(func() {
				next := time.Now().Add(pause * time.Duration(i) / time.Duration(threads))
				for n := 0; ; n++ {
					select {
					case <-c.stop:
						return
					default:
					}
					// Behind time it does not catch up with a burst.
					next = next.Add(pause)
					if late := time.Since(next); late > 10*pause {
						next = next.Add(late)
					}
					time.Sleep(time.Until(next))
					// Addresses by turns, so that ports are not used up.
					pid, err := askFrom([4]byte{127, 2, byte(i), byte(n/1000%250 + 1)}, to)
					c.asked.Add(1)
					c.count(pid, err)
				}
			})
		})
	}
	s.t.Cleanup(func() { c.end() })
	return c
}

// askFrom makes one connection and returns who answered.
func askFrom(from [4]byte, to *unix.SockaddrInet4) (pid int, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	for _, which := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} { // of connect, too
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, which, &limit); err != nil {
			return 0, os.NewSyscallError("setsockopt", err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: from}); err != nil {
		return 0, os.NewSyscallError("bind", err)
	}
	if err := retry(func() error { return unix.Connect(fd, to) }); err != nil {
		return 0, os.NewSyscallError("connect", err)
	}
	if err := retry(func() error { _, err := unix.Write(fd, []byte("who\n")); return err }); err != nil {
		return 0, os.NewSyscallError("write", err)
	}
	var answer []byte
	b := make([]byte, 64)
	for len(answer) == 0 || answer[len(answer)-1] != '\n' {
		var n int
		err := retry(func() (err error) { n, err = unix.Read(fd, b); return err })
		if err != nil {
			return 0, os.NewSyscallError("read", err)
		}
		if n == 0 {
			return 0, io.EOF
		}
		answer = append(answer, b[:n]...)
	}
	var generation int
	_, err = fmt.Sscan(string(answer), &generation, &pid)
	return pid, err
}

func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
