// SPDX-License-Identifier: Apache-2.0

package wgbind

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"

	"instar/dispatch"
	"instar/internal/rawconn"
)

// Options of a Bind. The zero value works.
type Options struct {
	// NoReceiveOffload leaves UDP_GRO off; see Limits in the package comment.
	// Default false.
	NoReceiveOffload bool
	// NoSendOffload leaves UDP_SEGMENT unused. Default false.
	NoSendOffload bool
	// Logger receives which messages were not sent, and when an offload is given up.
	// Default: nothing is logged.
	Logger *slog.Logger
}

// Stats count since New.
type Stats struct {
	// Announced are indices that were registered, each with a message that was sent.
	Announced uint64 `json:"announced"`
	// Conflicts are messages that were not sent since another generation has their
	// index.
	Conflicts uint64 `json:"conflicts"`
	// Withheld are initiations that were not sent since the generation is draining.
	Withheld uint64 `json:"withheld"`
}

// owner is what a Bind needs of a generation besides its sockets.
type owner interface {
	OwnIndex(worker int, index uint32) error
	State() dispatch.State
}

// Bind is a conn.Bind on the sockets of a generation. Its methods may be used by several
// goroutines.
type Bind struct {
	owner   owner
	log     *slog.Logger
	sockets []*socket
	port    uint16
	seed    maphash.Seed

	mu   sync.Mutex
	open *opening // nil while closed

	announced, conflicts, withheld atomic.Uint64
}

var _ conn.Bind = (*Bind)(nil)

// opening is the time from an Open to its Close.
type opening struct{ over atomic.Bool }

// New returns a Bind on the generation's sockets, which stay the generation's. There is one
// Bind for a generation.
func New(generation *dispatch.Generation, o Options) (*Bind, error) {
	b, err := newBind(generation, generation.Conns(), o)
	if err != nil {
		return nil, fmt.Errorf("bind WireGuard to generation %d: %w", generation.Number(), err)
	}
	return b, nil
}

func newBind(owner owner, conns []*net.UDPConn, o Options) (*Bind, error) {
	if len(conns) == 0 {
		return nil, errors.New("it has no sockets")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	b := &Bind{
		owner: owner,
		log:   o.Logger,
		port:  uint16(conns[0].LocalAddr().(*net.UDPAddr).Port),
		seed:  maphash.MakeSeed(),
	}
	for _, c := range conns {
		s, err := newSocket(c, o)
		if err != nil {
			return nil, err
		}
		b.sockets = append(b.sockets, s)
	}
	return b, nil
}

// Stats are the counts so far.
func (b *Bind) Stats() Stats {
	return Stats{Announced: b.announced.Load(), Conflicts: b.conflicts.Load(), Withheld: b.withheld.Load()}
}

// Open returns a function for each socket. The port is the group's: another one, 0 aside,
// is refused.
func (b *Bind) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	if port != 0 && port != b.port {
		return nil, 0, fmt.Errorf("open port %d: the group's port is %d; leave the listen port out, or set it to that", port, b.port)
	}
	o := &opening{}
	var receive []conn.ReceiveFunc
	for _, s := range b.sockets {
		if err := s.reopen(); err != nil {
			return nil, 0, fmt.Errorf("open port %d: %w", b.port, err)
		}
		receive = append(receive, func(packets [][]byte, sizes []int, endpoints []conn.Endpoint) (int, error) {
			return s.receive(o, packets, sizes, endpoints)
		})
	}
	b.open = o
	return receive, b.port, nil
}

// Close makes the functions of Open return net.ErrClosed. The sockets stay open, and
// what comes waits in their queues for the next Open.
func (b *Bind) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open == nil {
		return nil
	}
	b.open.over.Store(true)
	b.open = nil
	var err error
	for _, s := range b.sockets {
		err = errors.Join(err, s.interrupt())
	}
	if err != nil {
		return fmt.Errorf("close port %d: %w", b.port, err)
	}
	return nil
}

// SetMark sets SO_MARK of the sockets.
func (b *Bind) SetMark(mark uint32) error {
	for _, s := range b.sockets {
		err := rawconn.Of(s.conn, func(fd int) error {
			return os.NewSyscallError("setsockopt SO_MARK", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)))
		})
		if err != nil {
			return fmt.Errorf("set mark %#x: %w", mark, err)
		}
	}
	return nil
}

// BatchSize is the most packets of one call.
func (b *Bind) BatchSize() int { return conn.IdealBatchSize }

// ParseEndpoint reads "IP:port".
func (b *Bind) ParseEndpoint(s string) (conn.Endpoint, error) {
	at, err := netip.ParseAddrPort(s)
	if err != nil {
		return nil, err
	}
	return &endpoint{dst: unmap(at)}, nil
}

// Send sends the packets by the socket that the endpoint always gets, after it has
// registered the indices that they announce there.
func (b *Bind) Send(packets [][]byte, to conn.Endpoint) error {
	e, ok := to.(*endpoint)
	if !ok {
		return conn.ErrWrongEndpointType
	}
	b.mu.Lock()
	open := b.open
	b.mu.Unlock()
	if open == nil {
		return net.ErrClosed
	}
	worker := int(maphash.Comparable(b.seed, e.dst) % uint64(len(b.sockets)))
	for i, p := range packets {
		kind, index := announced(p)
		if kind == nothing {
			continue
		}
		send, err := b.announce(worker, kind, index, e)
		if err != nil {
			return err
		}
		if !send {
			// Handshake messages come alone, so this is for completeness.
			rest := append(append([][]byte(nil), packets[:i]...), packets[i+1:]...)
			return b.Send(rest, to)
		}
	}
	if len(packets) == 0 {
		return nil
	}
	return b.sockets[worker].send(packets, e, b.log)
}

// announce makes messages to the index come here, and reports whether the message that
// announces it may be sent.
func (b *Bind) announce(worker int, kind message, index uint32, to *endpoint) (send bool, err error) {
	if kind == initiation && b.owner.State() == dispatch.StateDraining {
		b.withheld.Add(1)
		b.log.Debug("initiation not sent: the generation is draining", "peer", to.DstToString())
		return false, nil
	}
	switch err := b.owner.OwnIndex(worker, index); {
	case errors.Is(err, dispatch.ErrConflict):
		b.conflicts.Add(1)
		b.log.Warn("handshake message not sent, the peer tries again", "peer", to.DstToString(), "reason", err)
		return false, nil
	case err != nil:
		return false, err
	}
	b.announced.Add(1)
	return true, nil
}

// message is a kind of WireGuard message.
type message int

const (
	nothing    message = iota // announces no index
	initiation                // first message of a handshake
	response                  // second
)

// Types and lengths of section 5.4 of the WireGuard paper.
const (
	typeInitiation, lenInitiation = 1, 148
	typeResponse, lenResponse     = 2, 92
)

// announced returns the index that its sender announces in a message.
func announced(p []byte) (message, uint32) {
	if len(p) != lenInitiation && len(p) != lenResponse {
		return nothing, 0
	}
	// The type is an octet, and three that are zero.
	switch kind, index := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint32(p[4:]); {
	case kind == typeInitiation && len(p) == lenInitiation:
		return initiation, index
	case kind == typeResponse && len(p) == lenResponse:
		return response, index
	}
	return nothing, 0
}
