// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"math/rand/v2"

	"golang.org/x/net/ipv4"

	"instar/dispatch"
)

const (
	// batchSize packets go into one system call.
	batchSize = 32
	// batches are prepared for each kind of packet.
	batches = 8
	// payload is what QUIC pads an Initial to (RFC 9000, section 14.1).
	payload = 1200

	longHeader  = 0xc0 // form and fixed bit, type Initial
	shortHeader = 0x40 // fixed bit
	version1    = 1
	foreignLen  = 8 // of a connection ID that the client chose
	longDCID    = 6 // offset of the DCID in a long header
)

// traffic makes the packets of one row.
type traffic struct {
	batches [batches][]ipv4.Message
	next    int
	// fresh makes each packet the start of a flow that nobody has seen.
	fresh bool
	rng   *rand.PCG
}

// newTraffic makes packets with what header writes, zeros behind it.
func newTraffic(fresh bool, header func(b []byte) error) (*traffic, error) {
	t := &traffic{fresh: fresh, rng: newPCG()}
	for i := range t.batches {
		t.batches[i] = make([]ipv4.Message, batchSize)
		for j := range t.batches[i] {
			b := make([]byte, payload)
			if err := header(b); err != nil {
				return nil, err
			}
			t.batches[i][j].Buffers = [][]byte{b}
		}
	}
	return t, nil
}

func newPCG() *rand.PCG { return rand.NewPCG(rand.Uint64(), rand.Uint64()) }

// batch returns the next packets to send.
func (t *traffic) batch() []ipv4.Message {
	b := t.batches[t.next]
	t.next = (t.next + 1) % batches
	if t.fresh {
		for i := range b {
			binary.LittleEndian.PutUint64(b[i].Buffers[0][longDCID:], t.rng.Uint64())
		}
	}
	return b
}

// plainTraffic means nothing to anybody.
func plainTraffic() (*traffic, error) {
	return newTraffic(false, func([]byte) error { return nil })
}

// ownTraffic has short headers with IDs of the generation's first so many workers in
// turn.
func ownTraffic(n *dispatch.Generation, workers int) (*traffic, error) {
	worker := 0
	return newTraffic(false, func(b []byte) error {
		b[0] = shortHeader
		_, err := n.ConnectionIDs().Append(b[:1], n.Handle(worker%workers), n.Number())
		worker++
		return err
	})
}

// strangeTraffic has short headers with IDs that nobody made. Their first octet
// is the one of ours, so that they are looked at to the end.
func strangeTraffic(n *dispatch.Generation) (*traffic, error) {
	rng := newPCG()
	return newTraffic(false, func(b []byte) error {
		b[0], b[1] = shortHeader, n.ConnectionIDs().FirstOctet()
		binary.LittleEndian.PutUint64(b[2:], rng.Uint64())
		binary.LittleEndian.PutUint64(b[10:], rng.Uint64())
		return nil
	})
}

// initialTraffic has Initials with DCIDs that clients chose: each one new, or
// the same ones again and again.
func initialTraffic(fresh bool) (*traffic, error) {
	rng := newPCG()
	return newTraffic(fresh, func(b []byte) error {
		b[0] = longHeader
		binary.BigEndian.PutUint32(b[1:], version1)
		b[longDCID-1] = foreignLen
		binary.LittleEndian.PutUint64(b[longDCID:], rng.Uint64())
		return nil
	})
}

// cookieTraffic has short headers with the cookie of each of the generation's workers in
// turn where classicProgram finds it.
func cookieTraffic(n *dispatch.Generation, workers int) (*traffic, error) {
	worker := 0
	return newTraffic(false, func(b []byte) error {
		b[0] = shortHeader
		binary.BigEndian.PutUint16(b[shortCookie:], n.Cookie(worker%workers))
		worker++
		return nil
	})
}

// indexTraffic has WireGuard data messages to an index of each of the generation's
// workers in turn.
func indexTraffic(n *dispatch.Generation, workers int) (*traffic, error) {
	for i := range workers {
		if err := n.OwnIndex(i, uint32(i)); err != nil {
			return nil, err
		}
	}
	worker := 0
	return newTraffic(false, func(b []byte) error {
		b[0] = 4
		b[4] = byte(worker % workers)
		worker++
		return nil
	})
}
