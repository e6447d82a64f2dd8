// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch"
)

// PacketCost is what a program does to one kind of packet.
type PacketCost struct {
	Program string `json:"program"`
	Packets string `json:"packets"`
	// Verdict is the outcome that the group's counters showed for every packet.
	Verdict string `json:"verdict,omitempty"`
	// Count is the number of packets of all rounds.
	Count uint64 `json:"count"`
	// Net is the time of the program for a packet in nanoseconds, less that of
	// the program that decides nothing; of that one it is the time itself.
	Net Spread `json:"net_ns"`
}

// Names that more than one place has.
const (
	plainName  = "plain"
	emptyName  = "empty"
	anyPackets = "any"
	ourPackets = "short header, our ID"

	classicPackets = "12 instructions of classic BPF, our cookie"
	connections    = "connection"

	knownFlow   = "known"
	crowdedFlow = "known, one of a million"

	crowdSize = 1_000_000
)

// row is one kind of packet to one receiver.
type row struct {
	PacketCost
	to      *receiver
	traffic *traffic // nil: TCP connections
	flows   []flow
	rounds  []float64 // gross nanoseconds a packet
}

// costs measures net nanoseconds a packet. The first row is the zero.
func costs(ctx context.Context, root string, rounds, packets int) (list []PacketCost, err error) {
	unpin, err := pin(0)
	if err != nil {
		return nil, err
	}
	defer unpin()
	rows, closeRows, err := costRows(root)
	defer func() { err = errors.Join(err, closeRows()) }()
	if err != nil {
		return nil, err
	}
	// The kernel counts until the descriptor is closed, in whatever way this
	// process ends.
	counting, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return nil, fmt.Errorf("count run time of programs (Linux 5.8): %w", err)
	}
	defer func() { err = errors.Join(err, counting.Close()) }()

	for i := -1; i < rounds; i++ {
		for j := range rows {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			// Another one is first in each round.
			r := &rows[(j+max(i, 0))%len(rows)]
			gross, err := r.round(packets)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", r.Program, r.Packets, err)
			}
			if i >= 0 { // before that everything gets warm
				r.rounds = append(r.rounds, gross)
				r.Count += uint64(packets)
			}
		}
	}
	for i, r := range rows {
		net := make([]float64, rounds)
		for j, gross := range r.rounds {
			net[j] = gross
			if i > 0 {
				net[j] -= rows[0].rounds[j]
			}
		}
		r.Net = spread(net)
		list = append(list, r.PacketCost)
	}
	return list, nil
}

// costRows makes the receivers and what is sent to them.
func costRows(root string) (rows []row, closeAll func() error, err error) {
	var owned []func() error
	closeAll = func() error {
		var errs []error
		for i := len(owned) - 1; i >= 0; i-- {
			errs = append(errs, owned[i]())
		}
		return errors.Join(errs...)
	}
	keep := func(r *receiver, err error) (*receiver, error) {
		if err == nil {
			owned = append(owned, r.close)
		}
		return r, err
	}
	add := func(program, packets, verdict string, to *receiver, t *traffic, err error) error {
		if err != nil {
			return err
		}
		r := row{PacketCost: PacketCost{Program: program, Packets: packets, Verdict: verdict}, to: to, traffic: t}
		for i := 0; t != nil && i < workers; i++ {
			f, err := newFlow(to.addr)
			if err != nil {
				return err
			}
			owned = append(owned, f.conn.Close)
			r.flows = append(r.flows, f)
		}
		rows = append(rows, r)
		return nil
	}

	empty, err := keep(newEmpty("127.0.0.1:4001"))
	if err != nil {
		return nil, closeAll, err
	}
	array, err := keep(newSelect("127.0.0.1:4002"))
	if err != nil {
		return nil, closeAll, err
	}
	stateless, err := keep(newInstar(root, "127.0.0.1:4003", dispatch.SteeringStateless))
	if err != nil {
		return nil, closeAll, err
	}
	quic, err := keep(newInstar(root, "127.0.0.1:4004", dispatch.SteeringQUIC))
	if err != nil {
		return nil, closeAll, err
	}
	// Its table is full of new handshakes.
	full, err := keep(newInstar(root, "127.0.0.1:4005", dispatch.SteeringQUIC))
	if err != nil {
		return nil, closeAll, err
	}
	flow, err := keep(newInstar(root, "127.0.0.1:4006", dispatch.SteeringFlow))
	if err != nil {
		return nil, closeAll, err
	}
	crowd, err := keep(newInstar(root, "127.0.0.1:4007", dispatch.SteeringFlow, func(o *dispatch.Options) { o.FlowEntries = 2 * crowdSize }))
	if err != nil {
		return nil, closeAll, err
	}
	wireguard, err := keep(newInstar(root, "127.0.0.1:4008", dispatch.SteeringWireGuard))
	if err != nil {
		return nil, closeAll, err
	}
	custom, err := keep(newClassic(root, "127.0.0.1:4009"))
	if err != nil {
		return nil, closeAll, err
	}
	tcp, err := keep(newInstar(root, "127.0.0.1:4010", dispatch.SteeringTCP, func(o *dispatch.Options) { o.ReceiveBuffer = 0 }))
	if err != nil {
		return nil, closeAll, err
	}

	plain, err := plainTraffic()
	err = add(emptyName, anyPackets, "", empty, plain, err)
	if err == nil {
		err = add("select", anyPackets, "", array, plain, nil)
	}
	if err == nil {
		err = add("stateless", anyPackets, name(bpf.VerdictNew), stateless, plain, nil)
	}
	if err == nil {
		t, e := ownTraffic(quic.generation, workers)
		err = add("quic", ourPackets, name(bpf.VerdictOwner), quic, t, e)
	}
	if err == nil {
		t, e := strangeTraffic(quic.generation)
		err = add("quic", "short header, unknown ID", name(bpf.VerdictUnknown), quic, t, e)
	}
	if err == nil {
		t, e := initialTraffic(false)
		err = add("quic", "Initial, known", name(bpf.VerdictKnown), quic, t, e)
	}
	if err == nil {
		t, e := initialTraffic(true)
		err = add("quic", "Initial, new", name(bpf.VerdictNew), full, t, e)
	}
	if err == nil {
		err = add("flow", knownFlow, name(bpf.VerdictKnown), flow, plain, nil)
	}
	if err == nil {
		err = add("flow", crowdedFlow, name(bpf.VerdictKnown), crowd, plain, nil)
	}
	if err == nil {
		t, e := indexTraffic(wireguard.generation, workers)
		err = add("wireguard", "data, known index", name(bpf.VerdictKnown), wireguard, t, e)
	}
	if err == nil {
		t, e := cookieTraffic(custom.generation, workers)
		err = add("custom", classicPackets, name(bpf.VerdictOwner), custom, t, e)
	}
	if err == nil {
		err = add("tcp", connections, name(bpf.VerdictNew), tcp, nil, nil)
	}
	if err != nil {
		return nil, closeAll, err
	}
	return rows, closeAll, errors.Join(fill(full), fillCrowd(crowd))
}

func name(v bpf.Verdict) string { return bpf.VerdictNames[v] }

// fill fills a receiver's table of flows, so that each new one takes the place of an
// old one.
func fill(r *receiver) error {
	flows, err := ebpf.LoadPinnedMap(filepath.Join(r.group.Path(), "flows"), nil)
	if err != nil {
		return fmt.Errorf("open flows of %s: %w", r.addr, err)
	}
	defer flows.Close()
	rng := newPCG()
	keys := make([]uint64, flows.MaxEntries())
	values := make([]bpf.Flow, len(keys))
	for i := range keys {
		keys[i] = rng.Uint64()
		values[i].Generation = r.generation.Number()
	}
	// A table of this kind counts as full before its last entry is used; what is more
	// takes the place of what is there.
	if _, err := flows.BatchUpdate(keys, values, nil); err != nil {
		return fmt.Errorf("fill flows of %s: %w", r.addr, err)
	}
	return nil
}

// fillCrowd gives a receiver a million flows that live.
func fillCrowd(r *receiver) error {
	flows, err := ebpf.LoadPinnedMap(filepath.Join(r.group.Path(), "flows"), nil)
	if err != nil {
		return fmt.Errorf("open flows of %s: %w", r.addr, err)
	}
	defer flows.Close()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return os.NewSyscallError("clock_gettime", err)
	}
	rng := newPCG()
	keys, values := make([]bpf.Peer, crowdSize), make([]bpf.Tracked, crowdSize)
	for i := range keys {
		// Documentation addresses (RFC 3849), which no client here has.
		binary.BigEndian.PutUint32(keys[i].Address[:], 0x20010db8)
		binary.NativeEndian.PutUint64(keys[i].Address[8:], rng.Uint64())
		keys[i].Port = uint16(i)
		values[i] = bpf.Tracked{
			Owner: uint64(r.generation.Handle(i%workers))<<32 | uint64(r.generation.Number()),
			Seen:  uint64(now.Nano()),
		}
	}
	if _, err := flows.BatchUpdate(keys, values, nil); err != nil {
		return fmt.Errorf("fill flows of %s: %w", r.addr, err)
	}
	c, err := r.group.FlowCounts()
	if err == nil && c.Live[r.generation.Number()] < crowdSize {
		err = fmt.Errorf("%d flows of %d stayed in the table of %s", c.Live[r.generation.Number()], crowdSize, r.addr)
	}
	return err
}

// settleTime is how long the kernel may take to deliver what was sent.
const settleTime = time.Second

// round sends packets and returns the average nanoseconds of the program.
func (r *row) round(packets int) (float64, error) {
	// Known handshakes are new once.
	if r.Verdict == name(bpf.VerdictKnown) && r.rounds == nil {
		if err := r.send(batches * batchSize); err != nil {
			return 0, err
		}
	}
	verdicts, err := r.verdicts()
	if err != nil {
		return 0, err
	}
	before, err := r.to.program.Stats()
	if err != nil {
		return 0, err
	}
	if err := r.send(packets); err != nil {
		return 0, err
	}
	after, err := r.to.program.Stats()
	if err != nil {
		return 0, err
	}
	if runs := after.RunCount - before.RunCount; runs != uint64(packets) {
		return 0, fmt.Errorf("the program ran %d times for %d packets", runs, packets)
	}
	if r.Verdict != "" {
		now, err := r.verdicts()
		if err != nil {
			return 0, err
		}
		if n := now[r.Verdict] - verdicts[r.Verdict]; n != uint64(packets) {
			return 0, fmt.Errorf("%d of %d packets had the verdict %s: %v, before %v", n, packets, r.Verdict, now, verdicts)
		}
	}
	return float64(after.Runtime-before.Runtime) / float64(packets), nil
}

// send sends a multiple of batchSize packets, in batches of the flows in turn, and reads
// them; or makes as many connections.
func (r *row) send(packets int) error {
	for i := range packets / batchSize {
		var err error
		if r.traffic == nil {
			err = connect(r.to.addr, batchSize)
		} else {
			err = r.flows[i%len(r.flows)].send(r.traffic.batch())
		}
		if err != nil {
			return err
		}
		got := r.to.drain()
		for deadline := time.Now().Add(settleTime); got < batchSize; got += r.to.drain() {
			if time.Now().After(deadline) {
				return fmt.Errorf("%d of %d packets came", got, batchSize)
			}
		}
	}
	return nil
}

func (r *row) verdicts() (map[string]uint64, error) {
	if r.to.group == nil {
		return nil, nil
	}
	s, err := r.to.group.Snapshot()
	return s.Verdicts, err
}
