// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch/connid"
	"instar/internal/rawconn"
)

// Generation is this process's membership in a group: one UDP socket or TCP listener a
// worker.
type Generation struct {
	group   *Group
	slot    uint8
	number  uint32
	sockets []socket
	answers *answers // of LearnAnswered

	mu         sync.Mutex
	closed     bool
	superseded chan struct{}
	signalled  bool
}

// socket is a *net.UDPConn or a *net.TCPListener.
type socket interface {
	syscall.Conn
	io.Closer
}

// Join binds one socket a worker and registers them as a new generation, which is
// staged: new flows do not reach it before it is activated. Either all sockets are
// registered when Join returns, or none is left open. TCP listeners listen already then,
// with the backlog of net.core.somaxconn.
//
// With UDP and a worker for each CPU the generations that stay lose nothing to sockets that
// close, whatever the moment; with fewer, a packet may be lost once in thousands of
// closes under heavy load, and one when a process is killed. SO_INCOMING_CPU of the
// sockets is in use for that.
//
// Errors: ErrOptions when workers is not between 1 and the group's Workers, *FullError
// when as many generations hold sockets as the group has room for (nothing was bound),
// ErrOccupied when other sockets stand in the way, ErrPermission, ErrBusy; with
// LearnAnswered ErrNotSupported where there is no control group of version 2.
func (g *Group) Join(workers int) (*Generation, error) {
	if workers < 1 || workers > int(g.table.workers) {
		return nil, fmt.Errorf("join %s: %w: %d workers, want 1 to %d; the group's limit is set when it is made",
			g.key, ErrOptions, workers, g.table.workers)
	}
	here, err := namespaceName()
	if err != nil {
		return nil, fmt.Errorf("join %s: %w", g.key, err)
	}
	if g.namespace != here {
		return nil, fmt.Errorf("join %s: %w: the group is of another network namespace than the calling thread; "+
			"open and join it in the same one", g.key, ErrMismatch)
	}
	var n *Generation
	release, err := g.use()
	if err != nil {
		return nil, fmt.Errorf("join %s: %w", g.key, err)
	}
	err = g.checkAddress()
	release()
	if err != nil {
		return nil, fmt.Errorf("join %s: %w", g.key, err)
	}
	err = g.update(func() (err error) {
		n, err = g.join(workers)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("join %s: %w", g.key, err)
	}
	if err := g.watch.add(n); err != nil {
		return nil, errors.Join(fmt.Errorf("join %s: %w", g.key, err), n.Close())
	}
	g.log.Info("generation is staged", "group", g.key.String(), "generation", n.number, "workers", workers)
	return n, nil
}

func (g *Group) join(workers int) (n *Generation, err error) {
	slot, ok := g.table.freeSlot(func(slot uint8) bool {
		info := &g.table.Info[slot]
		return info.PidNamespace != pidNamespace() || lives(info)
	})
	if !ok {
		return nil, &FullError{Group: g.Path(), Limit: int(g.table.generations), Occupants: g.generations()}
	}
	if err := g.reloadProgram(); err != nil {
		return nil, err
	}
	n = &Generation{group: g, slot: slot, number: g.table.NextNumber, superseded: make(chan struct{})}
	g.table.NextNumber++
	// The packets that the slot's counter has from its former users.
	before, err := g.traffic()
	if err != nil {
		return nil, err
	}
	info := &g.table.Info[slot]
	*info = bpf.Info{
		Stage:         bpf.StageJoining,
		Number:        n.number,
		Pid:           uint32(os.Getpid()),
		PidNamespace:  pidNamespace(),
		PidStart:      processStart(os.Getpid()),
		Joined:        now(),
		PacketsBefore: before[slot].packets,
	}
	setText(info.Build[:], g.build)
	step("announce")
	defer func() {
		if err != nil {
			err = errors.Join(err, n.answers.close(), n.closeSockets())
			g.vacate(slot)
			n = nil
		}
	}()
	// The number first: identifiers of the slot's former user must not reach the
	// new sockets.
	s := &g.table.Slots[slot]
	s.Workers = uint16(workers)
	atomic.StoreUint32(&s.Number, n.number)
	// The mark of the former user after the number: the data plane marks nobody whose
	// number has changed.
	s.Exhausted = 0
	step("number slot")
	cpus := cpusFor(workers)
	for w := range workers {
		var s socket
		if w == 0 {
			s, err = g.bindFirst()
		} else {
			s, err = g.bind(nil)
		}
		if err != nil {
			return n, g.explainBind(err)
		}
		n.sockets = append(n.sockets, s)
		preferOn(s, cpus[w])
		step("bind")
		if err := g.register(slot, w, s); err != nil {
			return n, err
		}
		step("register")
	}
	if Steering(g.table.Steering) == SteeringFlow && Learning(g.table.FlowLearning) == LearnAnswered {
		if n.answers, err = g.watchAnswers(n); err != nil {
			return n, err
		}
		step("watch answers")
	}
	slots, activated := g.table.order()
	g.table.publish(staged(slots, activated, slot))
	info.Stage = bpf.StageJoined
	step("join")
	return n, nil
}

// bindFirst makes the first socket of a generation and sees to it that the address has
// our program. A socket that is alone at the address gets it before it is bound, so
// that there is no moment in which the kernel's hash decides. The kernel refuses that
// when others are there already (udp_lib_lport_inuse in net/ipv4/udp.c); then the socket
// joins them, and attaching the program that they have anyway changes nothing.
//
// A TCP listener with a program joins others with theirs, and takes that
// (reuseport_add_sock in net/core/sock_reuseport.c).
func (g *Group) bindFirst() (socket, error) {
	current, err := g.home.current(g.pins.program)
	if err != nil {
		return nil, err
	}
	if slots, _ := g.table.order(); g.key.protocol() == tcp && !current && len(slots) > 0 {
		return g.bind(nil) // the others have the group's program, and this process has not
	}
	s, err := g.bind(g.attach)
	if err == nil && !current {
		setText(g.table.Program[:], "") // of another build than the table says; nobody knows which
		if err = g.home.attached(g.pins.program); err != nil {
			err = errors.Join(err, closeSockets(s))
		}
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		return s, err
	}
	if s, err = g.bind(nil); err != nil {
		return nil, err
	}
	if !current {
		return s, nil // as above
	}
	if err := rawconn.Of(s, g.attach); err != nil {
		return nil, errors.Join(err, closeSockets(s))
	}
	return s, nil
}

// bind makes one socket of the group; before is called with it before it is bound.
func (g *Group) bind(before func(fd int) error) (socket, error) {
	var failed error
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		failed = rawconn.Control(c, func(fd int) error {
			if err := g.prepareSocket(fd); err != nil || before == nil {
				return err
			}
			return before(fd)
		})
		return failed
	}}
	// The kernel has no reuseport programs for MPTCP, which is Go's default.
	config.SetMultipathTCP(false)
	var s any
	var err error
	if g.key.protocol() == tcp {
		s, err = config.Listen(context.Background(), g.key.network, g.key.addr.String())
	} else {
		s, err = config.ListenPacket(context.Background(), g.key.network, g.key.addr.String())
	}
	if failed != nil {
		return nil, failed // not in the words of package net
	}
	if err != nil {
		return nil, err
	}
	return s.(socket), nil
}

func (g *Group) prepareSocket(fd int) error {
	namespace, err := namespaceOf(fd)
	if err != nil {
		return err
	}
	if namespace != g.namespace {
		return fmt.Errorf("%w: the calling thread moved to another network namespace", ErrMismatch)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return os.NewSyscallError("setsockopt SO_REUSEPORT", err)
	}
	if g.key.device != "" {
		if err := unix.BindToDevice(fd, g.key.device); err != nil {
			return fmt.Errorf("bind to device %s: %w", g.key.device, os.NewSyscallError("setsockopt SO_BINDTODEVICE", err))
		}
	}
	if g.receiveBuffer > 0 {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, g.receiveBuffer) != nil {
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, g.receiveBuffer); err != nil {
				return os.NewSyscallError("setsockopt SO_RCVBUF", err)
			}
		}
	}
	return nil
}

// attach gives the reuseport group of a socket our program.
func (g *Group) attach(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, g.pins.program.FD()); err != nil {
		return fmt.Errorf("attach program: %w", os.NewSyscallError("setsockopt SO_ATTACH_REUSEPORT_EBPF", err))
	}
	return nil
}

// register puts a socket into the map.
func (g *Group) register(slot uint8, worker int, s socket) error {
	index := uint32(slot)*g.table.workers + uint32(worker)
	err := rawconn.Of(s, func(fd int) error { return g.pins.sockets.Put(index, uint64(fd)) })
	if err != nil {
		return fmt.Errorf("register socket of worker %d: %w", worker, err)
	}
	return nil
}

// Number is the generation's number in its group, from 1 on.
func (n *Generation) Number() uint32 { return n.number }

// Group is the group that was joined.
func (n *Generation) Group() *Group { return n.group }

// Workers is the number of sockets.
func (n *Generation) Workers() int { return len(n.sockets) }

// Conns are the sockets, one a worker; none with TCP. They belong to the Generation; do
// not close them, and do not call File on them.
func (n *Generation) Conns() []*net.UDPConn { return socketsOf[*net.UDPConn](n) }

// Listeners are the TCP listeners, one a worker; none with UDP. What closes one, such as
// http.Server.Shutdown, takes it out of the group, and the connections that wait at it
// move to the active generation. Do not call File on them.
func (n *Generation) Listeners() []*net.TCPListener { return socketsOf[*net.TCPListener](n) }

func socketsOf[S socket](n *Generation) []S {
	var list []S
	for _, s := range n.sockets {
		if s, ok := s.(S); ok {
			list = append(list, s)
		}
	}
	return list
}

// Handle names a worker's socket in the group, for connection IDs. Workers are
// counted from 0.
func (n *Generation) Handle(worker int) connid.Handle {
	return connid.MakeHandle(n.slot, uint8(worker))
}

// ConnectionIDs is the group's codec. Make the IDs of worker w with
//
//	codec.Append(nil, n.Handle(w), n.Number())
func (n *Generation) ConnectionIDs() *connid.Codec { return n.group.codec }

// State reads the generation's state from mapped memory.
func (n *Generation) State() State { return n.group.table.state(n.slot, n.number) }

// Wait returns once the state is one of those given, whoever changed it. With none
// given it waits for any change. It returns ctx's error, or ErrClosed after
// Group.Close.
func (n *Generation) Wait(ctx context.Context, states ...State) (State, error) {
	first := n.State()
	for {
		changed, err := n.group.watch.next()
		if err != nil {
			return n.State(), err
		}
		s := n.State()
		if slices.Contains(states, s) || len(states) == 0 && s != first {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return s, ctx.Err()
		case <-changed:
		}
	}
}

// Superseded returns a channel that is closed once another generation took this one's
// place, in whatever process. After a generation was reinstated it returns a new channel.
func (n *Generation) Superseded() <-chan struct{} {
	n.observe()
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.superseded
}

// observe brings the Superseded channel up to date.
func (n *Generation) observe() {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch s := n.State(); {
	case s == StateActive && n.signalled:
		n.superseded = make(chan struct{})
		n.signalled = false
	case (s == StateDraining || s == StateGone) && !n.signalled:
		close(n.superseded)
		n.signalled = true
	}
}

// Activate makes this generation the one that new flows go to; see [Group.Activate].
// Call it when the server is ready to serve.
func (n *Generation) Activate() error { return n.group.Activate(n.number) }

// Close leaves the group at once and closes the sockets: flows that are left are
// orphans, datagrams that are queued are lost. Drain first to lose nothing. With TCP
// nothing is lost as long as another generation is there: connections that wait to be
// accepted move to it. Closing again does nothing.
func (n *Generation) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	n.mu.Unlock()
	n.group.watch.remove(n)
	giveUpPreference(n.sockets...)
	err := n.group.update(func() error {
		if slot, ok := n.group.table.find(n.number); ok && slot == n.slot {
			n.group.leave(slot)
		}
		// Under the lock: nobody finds sockets at the address that are in no map.
		return hide(n.sockets...)
	})
	n.observe()
	if err = errors.Join(err, n.answers.close(), n.closeSockets()); err != nil {
		return fmt.Errorf("close generation %d of %s: %w", n.number, n.group.key, err)
	}
	return nil
}

func (n *Generation) closeSockets() error { return closeSockets(n.sockets...) }
