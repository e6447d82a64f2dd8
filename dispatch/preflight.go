// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/internal/sockdiag"
)

// settle is how long a socket that no visible process holds may take to go away:
// its process just closed it or died.
const settle = time.Second

// checkAddress looks at the sockets that have the group's port, and refuses those
// that would take packets from the group, keep it from binding, or join it behind
// the control plane's back. It is called before every bind.
func (g *Group) checkAddress() error {
	for start := time.Now(); ; time.Sleep(settle / 200) {
		rival, err := g.rival()
		if err == nil || rival == 0 || time.Since(start) > settle || len(sockdiag.Owners(rival)) > 0 {
			return err
		}
	}
}

// rival finds a socket that stands in the way, by its inode, and says in which.
func (g *Group) rival() (inode uint32, err error) {
	sockets, err := sockdiag.UDP(g.key.addr.Port())
	if err != nil {
		// A kernel without udp_diag, or a seccomp filter. Binding tells the worst of it.
		g.log.Warn("cannot see who else is at the address", "group", g.key.String(), "err", err)
		return 0, nil
	}
	device := 0
	if g.key.device != "" {
		i, err := net.InterfaceByName(g.key.device)
		if err != nil {
			return 0, fmt.Errorf("find device %s: %w; create it first, or correct the name", g.key.device, err)
		}
		device = i.Index
	}
	ours := g.cookies()
	uid := uint32(os.Geteuid())
	for _, s := range sockets {
		if s.Peer.IsValid() || ours[s.Cookie] {
			continue
		}
		switch g.key.relate(s, device) {
		case apart:
			continue
		case same:
			if s.UID != uid {
				return s.Inode, fmt.Errorf("%w: %s: %s is held by uid %d and this process has effective uid %d; the kernel lets only "+
					"one user share an address: run both as the same user, or stop the other one",
					ErrOccupied, g.key, describe(s), s.UID, uid)
			}
			if g.left(s) {
				continue
			}
			return s.Inode, fmt.Errorf("%w: %s: %s is not registered with this group; stop that process, or start it "+
				"through Instar as service %q so that it joins", ErrOccupied, g.key, describe(s), g.service)
		case narrower:
			if !g.allowOverlap {
				return s.Inode, fmt.Errorf("%w: %s: %s is more specific and takes its packets from this group; %s",
					ErrOccupied, g.key, describe(s), g.key.resolve(s))
			}
			g.log.Warn("a more specific socket takes packets from this group", "group", g.key.String(), "socket", describe(s))
		case wider:
			if !g.allowOverlap {
				return s.Inode, fmt.Errorf("%w: %s: %s is less specific; this group would take packets from it; %s",
					ErrOccupied, g.key, describe(s), g.key.resolve(s))
			}
			g.log.Warn("this group takes packets from a less specific socket", "group", g.key.String(), "socket", describe(s))
		case contested:
			if !g.allowOverlap {
				return s.Inode, fmt.Errorf("%w: %s: %s gets packets of this group, or this group gets its packets, by the order of binding; %s",
					ErrOccupied, g.key, describe(s), g.key.resolve(s))
			}
			g.log.Warn("this group and another socket get each other's packets by the order of binding", "group", g.key.String(), "socket", describe(s))
		}
	}
	return 0, nil
}

type relation int

const (
	apart relation = iota
	// same address and device: a member of the reuseport group, or a rival.
	same
	// narrower sockets take packets from us, wider ones lose packets to us.
	narrower
	wider
	// contested packets go to the one that was bound first, or last.
	contested
)

// relate compares a socket's address with the group's. The kernel looks for a socket
// of the packet's address, then for a wildcard one, and takes the first reuseport
// group that it finds (udp4_lib_lookup2 in net/ipv4/udp.c, udp6_lib_lookup2 in
// net/ipv6/udp.c): IPv4 sockets come first, the latest of them, then IPv6 ones, the
// earliest of them. A device adds nothing.
func (k key) relate(s sockdiag.Socket, device int) relation {
	v4 := s.Family == unix.AF_INET
	any4 := v4 || !s.V6Only && s.Local.Addr().IsUnspecified() || s.Local.Addr().Is4In6()
	any6 := !v4 && !s.Local.Addr().Is4In6()
	our4 := k.network == "udp4" || k.dualStack()
	our6 := k.network != "udp4"
	if (!any4 || !our4) && (!any6 || !our6) {
		return apart
	}
	if device != 0 && s.Device != 0 && device != s.Device {
		return apart
	}
	theirs, mine := s.Local.Addr().Unmap(), k.addr.Addr()
	if !theirs.IsUnspecified() && !mine.IsUnspecified() && theirs.WithZone("") != mine.WithZone("") {
		return apart
	}
	network := networkOf(s)
	switch {
	case network == k.network && theirs.WithZone("") == mine.WithZone("") && s.Device == device:
		return same
	case theirs.IsUnspecified() != mine.IsUnspecified():
		if mine.IsUnspecified() {
			return narrower
		}
		return wider
	case network == "udp4" && k.network != "udp4":
		return narrower
	case network != "udp4" && k.network == "udp4":
		return wider
	}
	return contested
}

func networkOf(s sockdiag.Socket) string {
	switch {
	case s.Family == unix.AF_INET, s.Local.Addr().Is4In6():
		return "udp4"
	case s.V6Only, !s.Local.Addr().IsUnspecified():
		return "udp6"
	default:
		return "udp"
	}
}

// resolve says what to do about a socket that overlaps.
func (k key) resolve(s sockdiag.Socket) string {
	switch theirs := networkOf(s); {
	case theirs != k.network && theirs != "udp4" && k.network != "udp4" && k.addr.Addr() == s.Local.Addr():
		return `the two differ in v6only: stop that process, set Network to "udp" (dual stack) or "udp6" (IPv6 only) in both, or set AllowOverlap`
	case theirs == k.network && k.addr.Addr().Unmap() == s.Local.Addr().Unmap():
		return "the two differ in the device: stop that process, bind both to devices, or set AllowOverlap"
	}
	return "stop that process, bind the same address, or set AllowOverlap"
}

// describe names a socket and who holds it.
func describe(s sockdiag.Socket) string {
	var b strings.Builder
	fmt.Fprintf(&b, "a socket on %s %s", networkOf(s), s.Local)
	if s.Device != 0 {
		if i, err := net.InterfaceByIndex(s.Device); err == nil {
			fmt.Fprintf(&b, " on device %s", i.Name)
		} else {
			fmt.Fprintf(&b, " on device %d", s.Device)
		}
	}
	owners := sockdiag.Owners(s.Inode)[s.Inode]
	if len(owners) == 0 {
		fmt.Fprintf(&b, " (of uid %d; its process cannot be seen from here)", s.UID)
		return b.String()
	}
	names := make([]string, len(owners))
	for i, p := range owners {
		names[i] = p.String()
	}
	fmt.Fprintf(&b, " (%s)", strings.Join(names, ", "))
	return b.String()
}

// cookies are the sockets that the map holds.
func (g *Group) cookies() map[uint64]bool {
	cookies := make(map[uint64]bool)
	if g.pins == nil {
		// The group is still to be made.
		return cookies
	}
	for s := range g.table.MaxGenerations {
		if g.table.Info[s].Stage == bpf.StageFree {
			continue // its entries were taken out
		}
		for w := range uint32(g.table.Slots[s].Workers) {
			var cookie uint64
			if g.pins.sockets.Lookup(s*g.table.MaxWorkers+w, &cookie) == nil {
				cookies[cookie] = true
			}
		}
	}
	return cookies
}

// left reports whether an unregistered socket belongs to a generation that has
// left the map and is about to close it.
func (g *Group) left(s sockdiag.Socket) bool {
	if g.pins == nil {
		return false
	}
	for _, p := range sockdiag.Owners(s.Inode)[s.Inode] {
		for i := range g.table.Info {
			info := &g.table.Info[i]
			if info.Pid == uint32(p.PID) && info.PidStart == processStart(p.PID) && info.PidNamespace == pidNamespace() {
				return true
			}
		}
	}
	return false
}

// explainBind says why the kernel refused a bind that the preflight let through.
func (g *Group) explainBind(err error) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		sockets, e := sockdiag.UDP(g.key.addr.Port())
		for _, s := range sockets {
			return fmt.Errorf("%w: bind %s: %w: %s; it may lack SO_REUSEPORT or belong to another user (uid %d, we are %d)",
				ErrOccupied, g.key, err, describe(s), s.UID, os.Geteuid())
		}
		return fmt.Errorf("%w: bind %s: %w", ErrOccupied, g.key, errors.Join(err, e))
	case errors.Is(err, unix.EACCES) && g.key.addr.Port() < 1024:
		return fmt.Errorf("%w: bind %s: %w; a port below net.ipv4.ip_unprivileged_port_start needs CAP_NET_BIND_SERVICE",
			ErrPermission, g.key, err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("bind %s: %w; no device of this network namespace has that address", g.key, err)
	}
	return fmt.Errorf("bind %s: %w", g.key, err)
}
