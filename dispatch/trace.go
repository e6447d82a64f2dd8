// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"instar/bpf"
	"instar/dispatch/connid"
)

// Event is what the data plane did with a packet, or with TCP with a connection.
type Event struct {
	Time time.Time
	// Peer sent it. It is not valid of a TCP connection that moved here from a listener that
	// closed (verdict "known").
	Peer netip.AddrPort
	// Verdict is a name of Snapshot.Verdicts.
	Verdict string
	// Generation and Worker got it; 0 and -1 with verdict "drop".
	Generation uint32
	Worker     int
	// Length is that of the payload in octets, Payload its beginning, up to 64 octets; 0 and none
	// with TCP.
	Length  int
	Payload []byte
	// Name says what the packet names, in words: a connection ID and whose it is, or an index.
	// It is empty where the steering reads no such thing.
	Name string
}

const (
	// traceRoom is the size of the ring buffer in octets.
	traceRoom = 1 << 20
	// udpHeader is the size of that in octets (RFC 768).
	udpHeader = 8
	// traceCheck is how often is looked whether the program was replaced.
	traceCheck = time.Second
)

// Trace calls f with each packet that comes, until ctx ends, and returns how many it could
// not be called with, because they came faster. For that time the group has another
// program, as with UpgradeProgram, whose rights it needs; with it a packet costs up to a
// microsecond more. Nothing of that is in the group before and after, unless the process is
// killed: then UpgradeProgram, or the next trace, takes it out. Minimum kernel: 5.8.
//
// A trace that begins ends one that runs already. The group stays open until it has ended.
//
// Errors: ErrState when another trace, or UpgradeProgram, replaced the program; ErrOptions
// with SteeringCustom for a Group without its dissector; those of UpgradeProgram.
func (g *Group) Trace(ctx context.Context, f func(Event)) (lost uint64, err error) {
	lost, err = g.trace(ctx, f)
	if err != nil {
		return lost, fmt.Errorf("trace %s: %w", g.key, err)
	}
	return lost, nil
}

func (g *Group) trace(ctx context.Context, f func(Event)) (lost uint64, err error) {
	var events, traced *ebpf.Map
	var program ebpf.ProgramID
	err = g.update(func() (err error) {
		if Steering(g.table.Steering) == SteeringCustom && g.dissector == nil {
			return fmt.Errorf("%w: its dissector is its server's, and a program that traces needs it", ErrOptions)
		}
		if events, traced, err = g.swapProgram(traceRoom); err != nil {
			return err
		}
		program, err = programID(g.pins.program)
		return err
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, g.endTrace(program), events.Close(), traced.Close()) }()
	reader, err := ringbuf.NewReader(events)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	stop := context.AfterFunc(ctx, func() { _ = reader.Flush() })
	defer stop()

	var r ringbuf.Record
	for ctx.Err() == nil {
		reader.SetDeadline(time.Now().Add(traceCheck))
		err := reader.ReadInto(&r)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if err := g.stillHas(program); err != nil {
				return lostEvents(traced), err
			}
			continue
		}
		if errors.Is(err, ringbuf.ErrFlushed) {
			continue
		}
		if err != nil {
			return lostEvents(traced), err
		}
		var e bpf.Event
		if _, err := binary.Decode(r.RawSample, binary.NativeEndian, &e); err != nil {
			return lostEvents(traced), fmt.Errorf("decode event: %w", err)
		}
		f(g.event(&e))
	}
	return lostEvents(traced), nil
}

// lostEvents counts those that found no room.
func lostEvents(traced *ebpf.Map) (n uint64) {
	var cpus []bpf.Traced
	if traced.Lookup(uint32(0), &cpus) != nil {
		return 0
	}
	for _, c := range cpus {
		n += c.Lost
	}
	return n
}

// endTrace gives the group a program without a trace, unless it has another one than
// that by now.
func (g *Group) endTrace(program ebpf.ProgramID) error {
	return g.update(func() error {
		if errors.Is(g.hasProgram(program), ErrState) {
			return nil
		}
		_, _, err := g.swapProgram(0)
		return err
	})
}

// stillHas is hasProgram for who has no lock.
func (g *Group) stillHas(program ebpf.ProgramID) error {
	return g.withPins(func() error { return g.hasProgram(program) })
}

// hasProgram returns ErrState when the group's program is another one.
func (g *Group) hasProgram(program ebpf.ProgramID) error {
	now, err := g.home.openProgram()
	if err != nil {
		return err
	}
	id, err := programID(now)
	if err = errors.Join(err, now.Close()); err != nil {
		return err
	}
	if id != program {
		return fmt.Errorf("%w: the program was replaced, by another trace or an upgrade", ErrState)
	}
	return nil
}

func (g *Group) event(e *bpf.Event) Event {
	out := Event{Time: wall(e.Time), Worker: -1, Peer: peerOf(bpf.Peer{Address: e.Peer.Address, Port: e.Peer.Port})}
	if int(e.Verdict) < bpf.Verdicts {
		out.Verdict = bpf.VerdictNames[e.Verdict]
	}
	if out.Verdict != bpf.VerdictNames[bpf.VerdictDrop] {
		h := connid.Handle(e.Handle)
		out.Generation, out.Worker = g.table.Slots[h.Slot()].Number, int(h.Worker())
	}
	if Steering(g.table.Steering) == SteeringTCP {
		if e.Peer.Port == 0 {
			out.Peer = netip.AddrPort{}
		}
		return out
	}
	out.Length = max(0, int(e.Length)-udpHeader)
	if n := int(e.Captured); n > udpHeader && n <= len(e.Octets) {
		out.Payload = append([]byte(nil), e.Octets[udpHeader:n]...)
	}
	out.Name = g.nameOf(out.Payload)
	return out
}

// nameOf says what a packet names.
func (g *Group) nameOf(payload []byte) string {
	switch Steering(g.table.Steering) {
	case SteeringQUIC:
		return g.connectionName(payload)
	case SteeringWireGuard:
		return wireguardName(payload)
	default:
		return ""
	}
}

func (g *Group) connectionName(payload []byte) string {
	number := func(h connid.Handle) uint32 { return g.table.Slots[h.Slot()].Number }
	class := g.codec.Classify(payload, number)
	var dcid []byte
	form := "short header"
	if class.Long {
		form = "long header"
		if h, err := connid.ParseHeader(payload); err == nil {
			dcid = h.DCID
		}
	} else if id, ok := g.codec.ShortDCID(payload); ok {
		dcid = id
	}
	switch {
	case int(g.table.Prefix) != g.codec.PrefixLen():
		return form // a tool does not know the group's load balancer, and cannot read its IDs
	case class.Kind == connid.KindOurs:
		return fmt.Sprintf("%s, ID %x of generation %d, worker %d", form, dcid, number(class.Handle), class.Handle.Worker())
	case class.Kind == connid.KindInvalid:
		return "no QUIC"
	case dcid == nil:
		return form
	default:
		return fmt.Sprintf("%s, ID %x", form, dcid)
	}
}

// wireguardName reads the header of a WireGuard message.
func wireguardName(payload []byte) string {
	if len(payload) < 8 || payload[1]|payload[2]|payload[3] != 0 {
		return "no WireGuard"
	}
	at := 4
	if payload[0] == 2 { // a response names its sender first
		at = 8
	}
	names := map[byte]string{1: "initiation", 2: "response", 3: "cookie", 4: "data"}
	switch what, ok := names[payload[0]]; {
	case !ok || len(payload) < at+4:
		return "no WireGuard"
	case payload[0] == 1:
		return what
	default:
		return fmt.Sprintf("%s for index %08x", what, binary.LittleEndian.Uint32(payload[at:]))
	}
}
