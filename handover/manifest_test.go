// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// More descriptors than fit in one frame come with their names, and serve.
func TestManyDescriptors(t *testing.T) {
	const each = 50 // of listeners, Unix listeners, datagram sockets, files
	socket, folder := socketPath(t), t.TempDir()
	path := func(i int) string { return filepath.Join(folder, fmt.Sprint(i)) }
	var addrs [2 * each]net.Addr
	var packets [each]string
	var accepting sync.WaitGroup
	serve := func(g *generation, l net.Listener, name string) {
		accepting.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				fmt.Fprintf(c, "%s of %d", name, g.Generation())
				_ = c.Close()
			}
		})
	}
	listen := func(g *generation) (conns []*net.UDPConn) {
		for i := range each {
			for j, network := range []string{"tcp", "unix"} {
				name := fmt.Sprint(network, i)
				address := map[string]string{"tcp": "127.0.0.1:0", "unix": path(i)}[network]
				l, err := g.Listen(name, network, address)
				if err != nil {
					t.Fatal(err)
				}
				if old := addrs[i+j*each]; old != nil && old.String() != l.Addr().String() {
					t.Errorf("%s listens at %v, before at %v", name, l.Addr(), old)
				}
				addrs[i+j*each] = l.Addr()
				serve(g, l, name)
			}
			c, err := g.ListenPacket(fmt.Sprint("udp", i), "udp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			if old := packets[i]; old != "" && old != c.LocalAddr().String() {
				t.Errorf("udp%d is at %v, before at %v", i, c.LocalAddr(), old)
			}
			packets[i] = c.LocalAddr().String()
			conns = append(conns, c.(*net.UDPConn))
		}
		return conns
	}
	first := mustStart(t, testOptions(t, socket), func(g *generation) {
		listen(g)
		for i := range each {
			f, err := os.OpenFile(filepath.Join(folder, fmt.Sprint("file", i)), os.O_CREATE|os.O_RDWR, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = f.Close() })
			if _, err := fmt.Fprintf(f, "content %d", i); err != nil {
				t.Fatal(err)
			}
			if err := g.Add(fmt.Sprint("file", i), f); err != nil {
				t.Fatal(err)
			}
		}
	})
	options := testOptions(t, socket)
	frames := 0
	options.step = func(step string, _ *peer) error {
		if step == "manifest" {
			frames++
		}
		return nil
	}
	second := mustStart(t, options, func(g *generation) {
		listen(g)
		for i := range each {
			f, err := g.File(fmt.Sprint("file", i))
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(io.NewSectionReader(f, 0, 100))
			if err := errors.Join(err, f.Close()); err != nil || string(b) != fmt.Sprint("content ", i) {
				t.Errorf("file%d has %q, %v", i, b, err)
			}
		}
	})
	superseded(t, first)
	settled(t, second)
	// With the listener of the test, the control socket and a lifeline.
	if want := (4*each + 3 + maxFrameFDs - 1) / maxFrameFDs; frames != want {
		t.Errorf("%d frames, want %d", frames, want)
	}
	for i := range each {
		for j, network := range []string{"tcp", "unix"} {
			if got, want := ask(t, addrs[i+j*each]), fmt.Sprintf("%s%d of 2", network, i); got != want {
				t.Errorf("%s%d answers %q, want %q", network, i, got, want)
			}
		}
	}
	first.stop()
	second.stop()
	accepting.Wait()
}

// A manifest that is not what its descriptors are is refused with the reason; the
// predecessor serves on, and no descriptor is left.
func TestWrongManifest(t *testing.T) {
	open := func() (fds [4]int) {
		var err error
		if fds[0], err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			t.Fatal(err)
		}
		if err := unix.Listen(fds[0], 1); err != nil {
			t.Fatal(err)
		}
		if fds[1], err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			t.Fatal(err)
		}
		if fds[2], err = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			t.Fatal(err)
		}
		if fds[3], err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			t.Fatal(err)
		}
		return fds
	}
	const listener, packet, file, idle = 0, 1, 2, 3
	for name, tc := range map[string]struct {
		entries func(c func(int) uint64) []entry
		fds     []int // by their place
		shut    bool  // the listener
		want    string
	}{
		"another role": {
			func(c func(int) uint64) []entry { return []entry{{Role: roleListener, Name: "a", Cookie: c(packet)}} },
			[]int{packet}, false, "is said to be a listener with cookie",
		},
		"a file for a socket": {
			func(c func(int) uint64) []entry { return []entry{{Role: rolePacket, Name: "a", Cookie: c(packet)}} },
			[]int{file}, false, "and is a file with cookie 0x0",
		},
		"a socket for a file": {
			func(func(int) uint64) []entry { return []entry{{Role: roleFile, Name: "a"}} },
			[]int{idle}, false, "is said to be a file",
		},
		"another cookie": {
			func(c func(int) uint64) []entry {
				return []entry{{Role: roleListener, Name: "a", Cookie: c(listener) + 1}}
			},
			[]int{listener}, false, "and is a listener with cookie",
		},
		"a listener that was shut down": {
			func(c func(int) uint64) []entry { return []entry{{Role: roleListener, Name: "a", Cookie: c(listener)}} },
			[]int{listener}, true, "and is a conn with cookie",
		},
		"a control socket that does not listen": {
			func(c func(int) uint64) []entry {
				return []entry{{Role: roleControl, Name: "control", Cookie: c(idle)}}
			},
			[]int{idle}, false, "and is a conn with cookie",
		},
		"fewer descriptors than entries": {
			func(c func(int) uint64) []entry {
				return []entry{{Role: roleListener, Name: "a", Cookie: c(listener)}, {Role: roleFile, Name: "b"}, {Role: roleFile, Name: "c"}}
			},
			[]int{listener, file}, false, "a manifest of 3 entries with 2 descriptors",
		},
		"more descriptors than entries": {
			func(func(int) uint64) []entry { return []entry{{Role: roleFile, Name: "b"}} },
			[]int{file, idle}, false, "a manifest of 1 entries with 2 descriptors",
		},
		"no descriptors": {
			func(func(int) uint64) []entry { return []entry{{Role: roleFile, Name: "b"}} },
			nil, false, "a manifest of 1 entries with 0 descriptors",
		},
		"a duplicate name": {
			func(c func(int) uint64) []entry {
				return []entry{{Role: roleListener, Name: "a", Cookie: c(listener)}, {Role: roleFile, Name: "a"}}
			},
			[]int{listener, file}, false, `two of the name "a"`,
		},
		"a name that came before": {
			// The predecessor's own frame comes behind this one.
			func(c func(int) uint64) []entry {
				return []entry{{Role: roleListener, Name: "web", Cookie: c(listener)}}
			},
			[]int{listener}, false, `two of the name "web"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := openFiles(t)
			socket := socketPath(t)
			options := testOptions(t, socket)
			struck := false // once
			options.step = func(step string, p *peer) error {
				if step != "sent-hello" || struck {
					return nil
				}
				struck = true
				fds := open()
				defer closeAll(fds[:])
				m := manifest{Entries: tc.entries(func(i int) uint64 {
					c, err := cookie(fds[i])
					if err != nil {
						t.Error(err)
					}
					return c
				})}
				if tc.shut {
					if err := unix.Shutdown(fds[listener], unix.SHUT_RDWR); err != nil {
						t.Error(err)
					}
				}
				var send []int
				for _, i := range tc.fds {
					send = append(send, fds[i])
				}
				return p.send(frameManifest, m, send...)
			}
			first := mustStart(t, options, nil)
			serving := openFiles(t)
			_, err := start(t, testOptions(t, socket), nil)
			if !errors.Is(err, ErrProtocol) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the successor: %v, want %q", err, tc.want)
			}
			settledUpgrade(t, first)
			if now := openFiles(t); now > serving {
				t.Errorf("%d open files, before %d", now, serving)
			}
			if got := ask(t, first.l.Addr()); got != "1" {
				t.Errorf("generation %s answers", got)
			}
			second := mustStart(t, testOptions(t, socket), nil)
			superseded(t, first)
			settled(t, second)
			first.stop()
			second.stop()
			if now := openFiles(t); now > before {
				t.Errorf("%d open files at the end, before %d", now, before)
			}
		})
	}
}

// What the application has closed does not go to a successor, whose names are
// those of the others.
func TestClosedDescriptor(t *testing.T) {
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), func(g *generation) {
		for _, name := range []string{"closed", "file"} {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			if err := g.Add(name, f); err != nil {
				t.Fatal(err)
			}
			if name == "closed" {
				err = f.Close()
			} else {
				t.Cleanup(func() { _ = f.Close() })
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
	second := mustStart(t, testOptions(t, socket), func(g *generation) {
		if _, err := g.File("closed"); !errors.Is(err, ErrNotInherited) {
			t.Errorf("the closed one: %v", err)
		}
		f, err := g.File("file")
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	superseded(t, first)
	settled(t, second)
}

// Of peers that say nothing the oldest makes room for the newest, whichever
// goroutine is faster, and one that has spoken is not among them.
func TestQuietPeers(t *testing.T) {
	var q quiet
	var all []*caller
	for range maxQuiet {
		all = append(all, q.add(t.Context()))
	}
	q.remove(all[3])
	spoken := all[3]
	all = append(all[:3:3], all[4:]...)
	for range 3 { // one has room
		all = append(all, q.add(t.Context()))
	}
	for i, who := range all {
		if gone := who.ctx.Err() != nil; gone != (i < 2) {
			t.Errorf("number %d may go: %t", i, gone)
		}
	}
	q.remove(spoken) // again does nothing
	if len(q.all) != maxQuiet {
		t.Errorf("%d are quiet", len(q.all))
	}
	for _, who := range all {
		q.remove(who)
	}
}
