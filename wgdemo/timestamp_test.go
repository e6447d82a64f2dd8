// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tai64n"
	"golang.zx2c4.com/wireguard/tun/tuntest"
)

// wire is a conn.Bind of channels. A device closes it before it opens it.
type wire struct {
	in, out chan []byte
	closed  chan struct{}
}

func newWire() *wire {
	return &wire{in: make(chan []byte, 10), out: make(chan []byte, 10)}
}

func (w *wire) Open(uint16) ([]conn.ReceiveFunc, uint16, error) {
	closed := make(chan struct{})
	w.closed = closed
	return []conn.ReceiveFunc{func(packets [][]byte, sizes []int, endpoints []conn.Endpoint) (int, error) {
		select {
		case p := <-w.in:
			sizes[0], endpoints[0] = copy(packets[0], p), somewhere()
			return 1, nil
		case <-closed:
			return 0, net.ErrClosed
		}
	}}, 1, nil
}

func (w *wire) Close() error {
	if w.closed != nil {
		close(w.closed)
		w.closed = nil
	}
	return nil
}

func (w *wire) SetMark(uint32) error { return nil }
func (w *wire) BatchSize() int       { return 1 }

func (w *wire) Send(packets [][]byte, _ conn.Endpoint) error {
	for _, p := range packets {
		w.out <- append([]byte(nil), p...)
	}
	return nil
}

func (w *wire) ParseEndpoint(string) (conn.Endpoint, error) { return somewhere(), nil }

func somewhere() conn.Endpoint {
	return &conn.StdNetEndpoint{AddrPort: netip.MustParseAddrPort("192.0.2.1:1")}
}

// An initiation that a generation has accepted is refused by the next one.
func TestReplay(t *testing.T) {
	gatewayKeys, err := newKeyPair()
	if err != nil {
		t.Fatal(err)
	}
	peerKeys, err := newKeyPair()
	if err != nil {
		t.Fatal(err)
	}
	start := func(own, other keyPair) (*device.Device, *wire) {
		w := newWire()
		// The device goes up by an event of the made-up TUN device, or here.
		d := device.NewDevice(tuntest.NewChannelTUN().TUN(), w, &device.Logger{Verbosef: device.DiscardLogf, Errorf: t.Logf})
		t.Cleanup(d.Close)
		if err := d.IpcSet(fmt.Sprintf("private_key=%x\npublic_key=%x\nendpoint=192.0.2.1:1\n", own.private[:], other.public[:])); err != nil {
			t.Fatal(err)
		}
		if err := d.Up(); err != nil {
			t.Fatal(err)
		}
		return d, w
	}
	first, firstWire := start(gatewayKeys, peerKeys)
	next, nextWire := start(gatewayKeys, peerKeys)
	forgetful, forgetfulWire := start(gatewayKeys, peerKeys)
	peer, peerWire := start(peerKeys, gatewayKeys)

	if err := peer.LookupPeer(gatewayKeys.public).SendHandshakeInitiation(false); err != nil {
		t.Fatal(err)
	}
	initiation := <-peerWire.out
	firstWire.in <- initiation
	if answer := <-firstWire.out; answer[0] != device.MessageResponseType {
		t.Fatalf("%x", answer)
	}
	status, err := statusOf(first)
	if err != nil || len(status) != 1 || status[0].timestamp == (tai64n.Timestamp{}) {
		t.Fatalf("no timestamp: %+v, %v", status, err)
	}
	refuseUntil(next.LookupPeer(peerKeys.public), status[0].timestamp)
	nextWire.in <- initiation
	forgetfulWire.in <- initiation
	if answer := <-forgetfulWire.out; answer[0] != device.MessageResponseType {
		t.Fatalf("%x", answer)
	}
	_ = forgetful

	// A later one is taken; what comes first is its answer, and not that to the old one.
	peer.LookupPeer(gatewayKeys.public).ExpireCurrentKeypairs()
	time.Sleep(2 * device.HandshakeInitationRate) // the timestamps are as coarse as that
	if err := peer.LookupPeer(gatewayKeys.public).SendHandshakeInitiation(false); err != nil {
		t.Fatal(err)
	}
	later := <-peerWire.out
	nextWire.in <- later
	answer := <-nextWire.out
	if answer[0] != device.MessageResponseType || string(answer[8:12]) != string(later[4:8]) {
		t.Fatalf("answered %x, want the index %x", answer[:12], later[4:8])
	}
	// An earlier timestamp changes nothing.
	refuseUntil(next.LookupPeer(peerKeys.public), status[0].timestamp)
	if got := timestampOf(next.LookupPeer(peerKeys.public)); !got.After(status[0].timestamp) {
		t.Errorf("timestamp %v is not after %v", got, status[0].timestamp)
	}
}
