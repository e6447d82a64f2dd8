// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"instar/internal/capset"
)

// The main goroutine keeps the main thread, so that no test runs there: the
// namespace of the main thread is what /proc/self/ns/net and /proc/self/net
// show to the whole process.
func init() { runtime.LockOSThread() }

// Netns is a network namespace that lives as long as the test that made it.
type Netns struct {
	t      testing.TB
	handle netns.NsHandle
}

// NetNS makes a network namespace whose only device is lo, up, and puts the
// calling goroutine into it until the test ends: it locks the goroutine to its
// thread. Sockets that this goroutine opens and processes that it starts are
// in the namespace. Other goroutines are not, those of t.Run included: they
// use Run.
//
// The test is skipped when it lacks the privilege.
func NetNS(t testing.TB) *Netns {
	t.Helper()
	n := OtherNetNS(t)
	runtime.LockOSThread()
	old, err := netns.Get()
	if err != nil {
		t.Fatalf("open the network namespace of the thread: %v", err)
	}
	if err := netns.Set(n.handle); err != nil {
		t.Fatalf("enter network namespace: %v", errors.Join(err, old.Close()))
	}
	thread := unix.Gettid()
	t.Cleanup(func() {
		if unix.Gettid() != thread {
			t.Error("NetNS was not called by the goroutine that runs the test")
		}
		if err := netns.Set(old); err != nil {
			// The goroutine stays locked, so that the thread ends with it.
			t.Errorf("leave network namespace: %v", err)
		} else {
			runtime.UnlockOSThread()
		}
		if err := old.Close(); err != nil {
			t.Errorf("close network namespace: %v", err)
		}
	})
	return n
}

// OtherNetNS makes a network namespace as NetNS does and leaves the calling
// goroutine where it is.
func OtherNetNS(t testing.TB) *Netns {
	t.Helper()
	Need(t, capset.SysAdmin, capset.NetAdmin)
	handle, err := makeNetNS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := handle.Close(); err != nil {
			t.Errorf("close network namespace: %v", err)
		}
	})
	return &Netns{t: t, handle: handle}
}

func makeNetNS() (netns.NsHandle, error) {
	type result struct {
		handle netns.NsHandle
		err    error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		handle, err := netns.New()
		if err != nil {
			made <- result{err: fmt.Errorf("make network namespace: %w", err)}
			return
		}
		if err := setUp("lo"); err != nil {
			made <- result{err: errors.Join(err, handle.Close())}
			return
		}
		made <- result{handle: handle}
	}()
	r := <-made
	return r.handle, r.err
}

func setUp(device string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find device %s: %w", device, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set device %s up: %w", device, err)
	}
	return nil
}

// FD is a descriptor of the namespace. It belongs to the Netns.
func (n *Netns) FD() int { return int(n.handle) }

// Run calls f on the calling goroutine while that is in the namespace. f may
// end the test (t.Fatal); goroutines that it starts are not in the namespace.
func (n *Netns) Run(f func()) {
	runtime.LockOSThread()
	old, err := netns.Get()
	if err != nil {
		panic(fmt.Sprintf("open the network namespace of the thread: %v", err))
	}
	defer old.Close()
	if err := netns.Set(n.handle); err != nil {
		panic(fmt.Sprintf("enter network namespace: %v", err))
	}
	defer func() {
		if err := netns.Set(old); err != nil {
			// Still locked: the thread ends with the goroutine.
			panic(fmt.Sprintf("leave network namespace: %v", err))
		}
		runtime.UnlockOSThread()
	}()
	f()
}

// Cmd is an exec.Cmd that starts in a network namespace.
type Cmd struct {
	*exec.Cmd
	ns *Netns
}

// Command is exec.CommandContext with the test's context: the process is
// killed when the test ends.
func (n *Netns) Command(name string, args ...string) *Cmd {
	return &Cmd{Cmd: exec.CommandContext(n.t.Context(), name, args...), ns: n}
}

// Start is exec.Cmd.Start in the namespace.
func (c *Cmd) Start() (err error) {
	c.ns.Run(func() { err = c.Cmd.Start() })
	return err
}

// Run is exec.Cmd.Run in the namespace.
func (c *Cmd) Run() (err error) {
	c.ns.Run(func() { err = c.Cmd.Run() })
	return err
}

// Output is exec.Cmd.Output in the namespace.
func (c *Cmd) Output() (out []byte, err error) {
	c.ns.Run(func() { out, err = c.Cmd.Output() })
	return out, err
}

// CombinedOutput is exec.Cmd.CombinedOutput in the namespace.
func (c *Cmd) CombinedOutput() (out []byte, err error) {
	c.ns.Run(func() { out, err = c.Cmd.CombinedOutput() })
	return out, err
}

// AddDevice adds a device with the given addresses ("192.0.2.1/24",
// "2001:db8::1/64") and returns its index. It is up, and the addresses can be
// bound at once. What is sent out of it reaches nobody.
//
// It is one end of a veth pair, as not every kernel has dummy devices; the
// other end, named NAME-p, is up in the same namespace and has no address. The
// name has at most 13 bytes.
func (n *Netns) AddDevice(name string, addresses ...string) int {
	n.t.Helper()
	index, _ := Veth(n.t, End{n, name, addresses}, End{n, name + "-p", nil})
	return index
}

// End is one end of a pair of connected devices.
type End struct {
	NS        *Netns
	Name      string
	Addresses []string // with the length of the prefix
}

// Veth adds a pair of connected Ethernet devices and returns their indices.
// Both are up, and their addresses can be bound and reached at once.
func Veth(t testing.TB, a, b End) (indexA, indexB int) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = a.Name
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: b.Name, PeerNamespace: netlink.NsFd(b.NS.FD())}
	a.NS.Run(func() {
		if err := netlink.LinkAdd(veth); err != nil {
			t.Fatalf("add devices %s and %s: %v", a.Name, b.Name, err)
		}
	})
	// Both are up before they get addresses: neighbour discovery on a device
	// that was not ready when its address came waits for a second.
	for _, e := range []End{a, b} {
		e.NS.Run(func() {
			if err := setUp(e.Name); err != nil {
				t.Fatal(err)
			}
		})
	}
	index := func(e End) (index int) {
		e.NS.Run(func() {
			var err error
			if index, err = addAddresses(e.Name, e.Addresses); err != nil {
				t.Fatal(err)
			}
		})
		return index
	}
	return index(a), index(b)
}

func addAddresses(device string, addresses []string) (index int, err error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return 0, fmt.Errorf("find device %s: %w", device, err)
	}
	for _, address := range addresses {
		addr, err := netlink.ParseAddr(address)
		if err != nil {
			return 0, fmt.Errorf("parse address of device %s: %w", device, err)
		}
		if addr.IP.To4() == nil {
			addr.Flags = unix.IFA_F_NODAD // usable at once
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return 0, fmt.Errorf("add address %s to device %s: %w", address, device, err)
		}
	}
	return link.Attrs().Index, nil
}
