// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// item is a named descriptor that goes to successors.
type item struct {
	entry
	conn     syscall.Conn // whose descriptor is duplicated for a successor
	listener *Listener    // of Listen
}

// inherited is a descriptor that nobody asked for yet.
type inherited struct {
	entry
	fd     int // owned
	source string
}

const (
	fromPredecessor = "predecessor"
	fromActivation  = "socket activation"
)

func (i *inherited) String() string {
	if i.Address != "" {
		return fmt.Sprintf("%s %q (%s %s, from %s)", i.Role, i.Name, i.Network, i.Address, i.source)
	}
	return fmt.Sprintf("%s %q (from %s)", i.Role, i.Name, i.source)
}

// Listen returns the listener of that name: the predecessor's, or one of socket
// activation, or a new one. Network is "tcp", "tcp4", "tcp6", "unix" or
// "unixpacket". A predecessor's listener is taken when it was made for the same
// network and address; activation's whatever its address is, the
// administrator's word goes first. Address "" takes whatever was inherited, and
// the error is ErrNotInherited when that is nothing. Resolving a host name may
// take its time; Close ends it.
//
// After Superseded there is nothing to listen for: the error is that of Err,
// ErrSuperseded or ErrRolledBack. After Close it is ErrClosed.
//
// The name is the listener's role, the same in each generation and, for socket
// activation, in FileDescriptorName=. Accept waits until Ready.
func (h *Handover) Listen(name, network, address string) (net.Listener, error) {
	what := "listen"
	switch network {
	case "tcp", "tcp4", "tcp6", "unix", "unixpacket":
	default:
		return nil, fmt.Errorf("%s %q: network %q; use tcp, tcp4, tcp6, unix or unixpacket", what, name, network)
	}
	c, err := h.claim(what, roleListener, name)
	if err != nil {
		return nil, err
	}
	l, err := h.listen(c, network, address)
	if err != nil {
		h.giveBack(c)
		return nil, fmt.Errorf("%s %q: %w", what, name, h.closedOr(err))
	}
	it := &item{entry: entry{Role: roleListener, Name: name, Network: network, Asked: address, Address: l.addr.String()}, conn: l.inner, listener: l}
	if err := h.settle(c, it); err != nil {
		return nil, errors.Join(fmt.Errorf("%s %q: %w", what, name, err), l.Close())
	}
	return l, nil
}

// listen makes the listener of a claim.
func (h *Handover) listen(c *claim, network, address string) (*Listener, error) {
	var inner acceptor
	var err error
	switch got := h.find(c, network, address); {
	case got != nil:
		inner, err = c.use(got).listener()
	case address == "":
		err = ErrNotInherited
	default:
		inner, err = h.bind(network, address)
	}
	if err != nil {
		return nil, err
	}
	return newListener(inner, inner.Addr()), nil
}

// ListenPacket returns the datagram socket of that name: a *net.UDPConn or
// *net.UnixConn itself, so that GSO, ECN and batched reads work on it. Network
// is "udp", "udp4", "udp6" or "unixgram"; what is inherited, and the errors, are
// as in Listen.
//
// Until its predecessor closed it, both processes can read from the socket.
// Nothing is lost when each answers what it read: begin to read after Ready,
// read until Superseded, then close. For flows that must stay with their
// process, use package dispatch.
func (h *Handover) ListenPacket(name, network, address string) (net.PacketConn, error) {
	what := "listen"
	switch network {
	case "udp", "udp4", "udp6", "unixgram":
	default:
		return nil, fmt.Errorf("%s %q: network %q; use udp, udp4, udp6 or unixgram", what, name, network)
	}
	c, err := h.claim(what, rolePacket, name)
	if err != nil {
		return nil, err
	}
	conn, err := h.listenPacket(c, network, address)
	if err != nil {
		h.giveBack(c)
		return nil, fmt.Errorf("%s %q: %w", what, name, h.closedOr(err))
	}
	it := &item{entry: entry{Role: rolePacket, Name: name, Network: network, Asked: address, Address: conn.LocalAddr().String()}, conn: conn.(syscall.Conn)}
	if err := h.settle(c, it); err != nil {
		return nil, errors.Join(fmt.Errorf("%s %q: %w", what, name, err), conn.Close())
	}
	return conn, nil
}

// listenPacket makes the datagram socket of a claim.
func (h *Handover) listenPacket(c *claim, network, address string) (net.PacketConn, error) {
	switch got := h.find(c, network, address); {
	case got != nil:
		return c.use(got).packetConn()
	case address == "":
		return nil, ErrNotInherited
	}
	return h.bindPacket(network, address)
}

// File returns the inherited file of that name, which the caller closes. While
// it is open it goes to successors, too. The error is ErrNotInherited when there
// is none.
func (h *Handover) File(name string) (*os.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.free("inherit", name); err != nil {
		return nil, err
	}
	got := h.first(roleFile, name)
	if got == nil {
		return nil, fmt.Errorf("inherit file %q: %w", name, ErrNotInherited)
	}
	f := got.file()
	h.take(got, &item{entry: entry{Role: roleFile, Name: name}, conn: f})
	return f, nil
}

// Conn returns the inherited connection of that name, which the caller closes.
// While it is open it goes to successors, too. The error is ErrNotInherited when
// there is none.
func (h *Handover) Conn(name string) (net.Conn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.free("inherit", name); err != nil {
		return nil, err
	}
	got := h.first(roleConn, name)
	if got == nil {
		return nil, fmt.Errorf("inherit connection %q: %w", name, ErrNotInherited)
	}
	f := got.file()
	c, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("inherit connection %q: %w", name, err)
	}
	h.take(got, &item{entry: got.entry, conn: c.(syscall.Conn)})
	return c, nil
}

// Add hands something of the caller's to successors under a name: an *os.File,
// a net.Conn, or a socket that was made elsewhere. It stays the caller's; once
// it is closed it is not handed over any more. A successor gets it by File, Conn,
// Listen or ListenPacket, as fits it. A listener that is added is not paused
// when a successor takes over.
func (h *Handover) Add(name string, c syscall.Conn) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.free("add", name); err != nil {
		return err
	}
	if l, ok := c.(*Listener); ok {
		c = l.inner
	}
	var e entry
	if err := rawconn.Of(c, func(fd int) (err error) { e, err = describe(fd); return err }); err != nil {
		return fmt.Errorf("add %q: %w", name, err)
	}
	e.Name, e.Borrowed = name, true
	h.items[name] = &item{entry: e, conn: c}
	h.store(h.items[name])
	return nil
}

// Remove takes a name back: it goes to no successor that starts from now on. It
// closes nothing.
func (h *Handover) Remove(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if it := h.items[name]; it != nil {
		delete(h.items, name)
		h.unstore(it)
	}
}

// free checks a name that is to be used. Its caller holds mu.
func (h *Handover) free(what, name string) error {
	switch {
	case h.phase == phaseClosed:
		return fmt.Errorf("%s %q: %w", what, name, ErrClosed)
	case name == "" || len(name) > 200 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 127 || r == ':' }):
		return fmt.Errorf("%s %q: a name has 1 to 200 printable ASCII characters without space and colon", what, name)
	case h.claims[name]:
		return fmt.Errorf("%s %q: the name is in use by another call that is not done yet; each socket and file has its own", what, name)
	case h.items[name] != nil:
		if h.items[name].closed() {
			// The service manager's duplicate would keep the address in use.
			h.unstore(h.items[name])
			return nil
		}
		return fmt.Errorf("%s %q: the name is in use by a %s; each socket and file has its own", what, name, h.items[name].Role)
	}
	return nil
}

// closed says whether the caller has closed it.
func (it *item) closed() bool {
	return rawconn.Of(it.conn, func(int) error { return nil }) != nil
}

// unlinks says whether the last process removes the socket's path.
func (e *entry) unlinks() bool {
	return strings.HasPrefix(e.Network, "unix") && e.Role != roleConn && !e.Borrowed
}

// take records an item and forgets the inherited descriptor that it was made
// of. Its caller holds mu.
func (h *Handover) take(got *inherited, it *item) {
	h.items[it.Name] = it
	if got != nil {
		it.Borrowed = got.Borrowed || got.source == fromActivation
		h.inherited = slices.DeleteFunc(h.inherited, func(i *inherited) bool { return i == got })
	}
	// Whoever made a path removes it if it never serves; who serves, see start.
	if (got == nil || h.phase == phaseActive) && it.unlinks() {
		h.own(it.Address)
		h.mine[it.Address] = got == nil
	}
	h.store(it)
}

// claim reserves a name while its socket is made: resolving a host name and
// binding may take their time, and nothing else waits for them.
type claim struct {
	name       string
	candidates []*inherited // of this name and role; owned
	used       *inherited   // the one that the socket is made of, nil when it is new
}

// claim takes what was inherited under the name out of the others' reach, until
// settle or giveBack.
func (h *Handover) claim(what string, role roleName, name string) (*claim, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.free(what, name); err != nil {
		return nil, err
	}
	if h.phase == phaseSuperseded {
		return nil, fmt.Errorf("%s %q: %w", what, name, h.cause)
	}
	c := &claim{name: name, candidates: h.candidates(role, name)}
	h.inherited = slices.DeleteFunc(h.inherited, func(i *inherited) bool { return slices.Contains(c.candidates, i) })
	h.claims[name] = true
	return c, nil
}

// use takes the descriptor that the socket is made of.
func (c *claim) use(got *inherited) *inherited {
	c.used = got
	c.candidates = slices.DeleteFunc(c.candidates, func(i *inherited) bool { return i == got })
	return got
}

// giveBack ends a claim of which nothing came.
func (h *Handover) giveBack(c *claim) {
	h.mu.Lock()
	unused := h.release(c)
	h.mu.Unlock()
	h.dropUnused(unused)
}

// release frees the name, and returns the candidates of which nobody makes
// anything any more. Its caller holds mu.
func (h *Handover) release(c *claim) (unused []*inherited) {
	delete(h.claims, c.name)
	if h.phase == phaseStarting {
		h.inherited = append(h.inherited, c.candidates...)
		return nil
	}
	return c.candidates
}

// settle ends a claim with the item that came of it. With an error there is no
// use for it any more: its path is gone, and the caller closes it.
func (h *Handover) settle(c *claim, it *item) error {
	h.mu.Lock()
	unused := h.release(c)
	err := h.place(c, it)
	h.mu.Unlock()
	h.dropUnused(unused)
	if err == nil || c.used != nil || !it.unlinks() || it.Address[0] == '@' {
		return err
	}
	if at, ok := inodeOf(it.Address); ok {
		err = errors.Join(err, unlink(it.Address, at))
	}
	return err
}

// place records a claim's item, unless this process does not serve any more. Its
// caller holds mu.
func (h *Handover) place(c *claim, it *item) error {
	switch h.phase {
	case phaseClosed:
		return ErrClosed
	case phaseSuperseded:
		return h.cause
	}
	h.take(c.used, it)
	if h.phase == phaseActive && it.listener != nil {
		it.listener.resume()
	}
	return nil
}

// closedOr is ErrClosed when Close interrupted what failed.
func (h *Handover) closedOr(err error) error {
	if h.ctx.Err() != nil {
		return ErrClosed
	}
	return err
}

// candidates are what was inherited under the name, the predecessor's first: its
// socket is the one that is served now. The caller holds mu.
func (h *Handover) candidates(role roleName, name string) (all []*inherited) {
	for _, i := range h.inherited {
		if i.Name == name && i.Role == role {
			all = append(all, i)
		}
	}
	slices.SortStableFunc(all, func(a, b *inherited) int { return cmp.Compare(a.source, b.source) })
	return all
}

// first is the first candidate, nil when there is none. Its caller holds mu.
func (h *Handover) first(role roleName, name string) *inherited {
	if all := h.candidates(role, name); len(all) > 0 {
		return all[0]
	}
	return nil
}

// find looks for the candidate that fits.
func (h *Handover) find(c *claim, network, address string) *inherited {
	for _, i := range c.candidates {
		if i.source == fromActivation && sameNetwork(i.Network, network) {
			if address != "" && !sameAddress(h.ctx, network, address, i.Address) {
				h.log.Warn("socket activation has another address than the program asks for; it is used", "name", c.name, "address", i.Address, "asked", address)
			}
			return i
		}
		if i.source == fromPredecessor && (address == "" && sameNetwork(i.Network, network) ||
			i.Network == network && (i.Asked == address || sameAddress(h.ctx, network, address, i.Address))) {
			return i
		}
	}
	for _, i := range c.candidates {
		h.log.Info("the address is another than the predecessor's", "name", c.name, "predecessor", i.Network+" "+i.Address, "address", network+" "+address)
	}
	return nil
}

// sameNetwork compares "tcp4" with "tcp", but not "unix" with "unixpacket".
func sameNetwork(a, b string) bool {
	return strings.TrimRight(a, "46") == strings.TrimRight(b, "46")
}

// sameAddress says whether the address that the program asks for, or one of those
// that its host name has, is the local one. A port 0 asks for any.
func sameAddress(ctx context.Context, network, asked, local string) bool {
	if strings.HasPrefix(network, "unix") {
		return asked == local
	}
	host, service, err := net.SplitHostPort(asked)
	if err != nil {
		return false
	}
	port, err := net.DefaultResolver.LookupPort(ctx, network, service)
	if err != nil {
		return false
	}
	// Both networks have the same syntax.
	have, err := net.ResolveTCPAddr("tcp", local)
	if err != nil || port != 0 && port != have.Port {
		return false
	}
	if host == "" {
		return have.IP.IsUnspecified()
	}
	all, err := net.DefaultResolver.LookupIPAddr(ctx, host)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(all, func(want net.IPAddr) bool {
		switch is4 := want.IP.To4() != nil; {
		case strings.HasSuffix(network, "4") && !is4, strings.HasSuffix(network, "6") && is4:
			return false
		case want.IP.IsUnspecified():
			return have.IP.IsUnspecified()
		}
		return want.IP.Equal(have.IP) && want.Zone == have.Zone
	})
}

// describe finds out what a descriptor is.
func describe(fd int) (entry, error) {
	e := entry{Role: roleFile}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if errors.Is(err, unix.ENOTSOCK) {
		return e, nil
	}
	if err != nil {
		return e, os.NewSyscallError("getsockopt", err)
	}
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return e, os.NewSyscallError("getsockopt", err)
	}
	if e.Cookie, err = cookie(fd); err != nil {
		return e, err
	}
	listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return e, os.NewSyscallError("getsockopt", err)
	}
	_, unconnected := unix.Getpeername(fd)
	switch {
	case listens == 1:
		e.Role = roleListener
	case kind == unix.SOCK_DGRAM && unconnected != nil:
		e.Role = rolePacket
	default:
		e.Role = roleConn
	}
	switch {
	case domain == unix.AF_UNIX:
		e.Network = map[int]string{unix.SOCK_STREAM: "unix", unix.SOCK_DGRAM: "unixgram", unix.SOCK_SEQPACKET: "unixpacket"}[kind]
	case kind == unix.SOCK_STREAM:
		e.Network = "tcp"
	case kind == unix.SOCK_DGRAM:
		e.Network = "udp"
	default:
		return e, fmt.Errorf("socket of domain %d and type %d; only TCP, UDP and Unix sockets can be handed over", domain, kind)
	}
	e.Address, err = localAddress(fd)
	return e, err
}

func cookie(fd int) (uint64, error) {
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	return c, os.NewSyscallError("getsockopt SO_COOKIE", err)
}

// localAddress is the address as the net package writes it.
func localAddress(fd int) (string, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return "", os.NewSyscallError("getsockname", err)
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return (&net.TCPAddr{IP: a.Addr[:], Port: a.Port}).String(), nil
	case *unix.SockaddrInet6:
		addr := &net.TCPAddr{IP: a.Addr[:], Port: a.Port}
		if a.ZoneId != 0 {
			if link, err := net.InterfaceByIndex(int(a.ZoneId)); err == nil {
				addr.Zone = link.Name
			} else {
				addr.Zone = fmt.Sprint(a.ZoneId)
			}
		}
		return addr.String(), nil
	case *unix.SockaddrUnix:
		return a.Name, nil
	}
	return "", fmt.Errorf("local address of type %T", sa)
}

// file makes a file of the descriptor, which belongs to it from now on.
func (i *inherited) file() *os.File {
	f := os.NewFile(uintptr(i.fd), i.Name)
	i.fd = -1
	return f
}

// listener makes a listener of the descriptor. net duplicates it; that neither
// of the two leaves the non-blocking mode that the open file shares with the
// predecessor is because os.NewFile looks at the mode and Fd keeps it so.
func (i *inherited) listener() (acceptor, error) {
	f := i.file()
	l, err := net.FileListener(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return l.(acceptor), nil
}

func (i *inherited) packetConn() (net.PacketConn, error) {
	f := i.file()
	c, err := net.FilePacketConn(f)
	return c, errors.Join(err, f.Close())
}

// check compares a descriptor that came with what the manifest says about it,
// and makes sure that it is non-blocking, if it is a socket.
func (i *inherited) check() error {
	got, err := describe(i.fd)
	if err != nil {
		return err
	}
	want := i.entry
	switch want.Role {
	case roleControl:
		want.Role = roleListener
	case roleLifeline:
		want.Role = roleConn
	}
	if got.Role != want.Role || got.Cookie != want.Cookie {
		return fmt.Errorf("%w: %s is said to be a %s with cookie %#x and is a %s with cookie %#x", ErrProtocol, i, want.Role, want.Cookie, got.Role, got.Cookie)
	}
	if got.Role == roleFile {
		return nil
	}
	flags, err := unix.FcntlInt(uintptr(i.fd), unix.F_GETFL, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if flags&unix.O_NONBLOCK == 0 {
		// Of socket activation, or of a program that called Fd.
		return os.NewSyscallError("fcntl", unix.SetNonblock(i.fd, true))
	}
	return nil
}
