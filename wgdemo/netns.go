// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// namespace is a network namespace of this process, beside the one that it runs in.
type namespace netns.NsHandle

// newNamespace makes one whose lo is up.
func newNamespace() (namespace, error) {
	n := netns.None()
	err := onThread(func() (err error) {
		if n, err = netns.New(); err != nil {
			return fmt.Errorf("make network namespace: %w", err)
		}
		return linkUp("lo")
	})
	if err != nil && n.IsOpen() {
		err = errors.Join(err, n.Close())
	}
	return namespace(n), err
}

// run calls f on a thread in the namespace. Goroutines that f starts are not there.
func (n namespace) run(f func() error) error {
	return onThread(func() error {
		if err := netns.Set(netns.NsHandle(n)); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

func (n namespace) close() error { h := netns.NsHandle(n); return h.Close() }

// onThread calls f on a thread that ends with it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocks it
		done <- f()
	}()
	return <-done
}

func linkUp(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find device %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return nil
}

// connect adds a pair of Ethernet devices: one in the namespace of this process, one,
// named eth0, in the other.
func connect(name string, addresses []netip.Prefix, to namespace, theirs []netip.Prefix) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(to))}); err != nil {
		return fmt.Errorf("add devices %s and eth0: %w", name, err)
	}
	// Both are up before they get addresses: IPv6 waits for a second on a device that was
	// not ready.
	if err := errors.Join(linkUp(name), to.run(func() error { return linkUp("eth0") })); err != nil {
		return err
	}
	return errors.Join(addAddresses(name, addresses), to.run(func() error { return addAddresses("eth0", theirs) }))
}

func addAddresses(name string, addresses []netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find device %s: %w", name, err)
	}
	for _, prefix := range addresses {
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}}
		if prefix.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // usable at once
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add address %v to device %s: %w", prefix, name, err)
		}
	}
	return nil
}
