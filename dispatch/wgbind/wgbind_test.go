// SPDX-License-Identifier: Apache-2.0

package wgbind_test

import (
	"bytes"
	"crypto/ecdh"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"

	"instar/dispatch"
	"instar/dispatch/wgbind"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// patience is how long a test waits for what has to come.
const patience = 20 * time.Second

// world is a network namespace with groups.
type world struct {
	*testing.T
	root string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	testutil.NeedRoot(t)
	testutil.NetNS(t)
	return &world{t, filepath.Join(testutil.BPFFS(t), "instar")}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) join(address string, workers int) *dispatch.Generation {
	w.Helper()
	group, err := dispatch.Open(dispatch.Options{
		Address: address, Service: "test", Root: w.root, Steering: dispatch.SteeringWireGuard, ReceiveBuffer: 8 << 20,
	})
	w.must(err)
	w.Cleanup(func() { w.must(group.Close()) })
	generation, err := group.Join(workers)
	w.must(err)
	w.Cleanup(func() { w.must(generation.Close()) })
	return generation
}

func (w *world) bind(generation *dispatch.Generation) *wgbind.Bind {
	w.Helper()
	b, err := wgbind.New(generation, wgbind.Options{})
	w.must(err)
	return b
}

// packet is one that was received.
type packet struct {
	data []byte
	from conn.Endpoint
}

// opened is a bind whose packets are read.
type opened struct {
	*world
	bind    *wgbind.Bind
	packets chan packet
	closed  chan struct{}
	readers sync.WaitGroup
}

func (w *world) open(b *wgbind.Bind) *opened {
	w.Helper()
	functions, _, err := b.Open(0)
	w.must(err)
	o := &opened{world: w, bind: b, packets: make(chan packet, 4096), closed: make(chan struct{})}
	for _, receive := range functions {
		o.readers.Go(func() {
			batch := make([][]byte, b.BatchSize())
			for i := range batch {
				batch[i] = make([]byte, 1<<16)
			}
			sizes, endpoints := make([]int, len(batch)), make([]conn.Endpoint, len(batch))
			for {
				n, err := receive(batch, sizes, endpoints)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err != nil {
					w.Errorf("receive: %v", err)
					return
				}
				for i := range n {
					select {
					case o.packets <- packet{bytes.Clone(batch[i][:sizes[i]]), endpoints[i]}:
					case <-o.closed:
					}
				}
			}
		})
	}
	return o
}

func (o *opened) close() {
	o.Helper()
	close(o.closed)
	o.must(o.bind.Close())
	o.readers.Wait()
}

func (o *opened) next() packet {
	o.Helper()
	select {
	case p := <-o.packets:
		return p
	case <-time.After(patience):
		o.Fatal("no packet came")
		return packet{}
	}
}

func (o *opened) endpoint(at string) conn.Endpoint {
	o.Helper()
	e, err := o.bind.ParseEndpoint(at)
	o.must(err)
	return e
}

// cases of packets by their lengths.
func lengths() map[string][]int {
	repeat := func(n, size int) (all []int) {
		for range n {
			all = append(all, size)
		}
		return all
	}
	random := make([]int, 128)
	for i := range random {
		random[i] = 32 + rand.IntN(1400)
	}
	return map[string][]int{
		"one":                  {1000},
		"a batch":              repeat(128, 1400),
		"small ones":           repeat(128, 32),
		"a shorter one behind": append(repeat(20, 1400), 700),
		"shorter ones between": append(append(repeat(10, 1400), 700, 700), append(repeat(5, 1200), 1201)...),
		"longer than a train":  append(repeat(100, 1400), 33),
		"growing":              {100, 101, 102, 103},
		"shrinking":            {103, 102, 101, 100},
		"random":               random,
	}
}

// All packets come, in their order and as they were, over both families.
func TestPackets(t *testing.T) {
	for _, tc := range []struct {
		name, address, to, from string
	}{
		{"IPv4", "127.0.0.1:51820", "127.0.0.1:51820", "127.0.0.1"},
		{"IPv6", "[::1]:51820", "[::1]:51820", "::1"},
		{"dual stack, IPv4", "[::]:51820", "127.0.0.2:51820", "127.0.0.1"},
		{"dual stack, IPv6", "[::]:51820", "[::1]:51820", "::1"},
		{"wildcard, IPv4", "0.0.0.0:51820", "127.0.0.3:51820", "127.0.0.1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			server := w.open(w.bind(w.activated(tc.address)))
			defer server.close()
			client := w.open(w.bind(w.activated(net.JoinHostPort(tc.from, "51821"))))
			defer client.close()
			clientAt := netip.AddrPortFrom(netip.MustParseAddr(tc.from), 51821).String()
			for name, sizes := range lengths() {
				var sent [][]byte
				for i, size := range sizes {
					data := bytes.Repeat([]byte{byte(i)}, size)
					binary.LittleEndian.PutUint32(data, 4) // a data message
					sent = append(sent, data)
				}
				w.must(client.bind.Send(sent, client.endpoint(tc.to)))
				var back conn.Endpoint
				for i, want := range sent {
					got := server.next()
					if !bytes.Equal(got.data, want) {
						t.Fatalf("%s: packet %d of %d: %d bytes, want %d", name, i, len(sent), len(got.data), len(want))
					}
					back = got.from
				}
				if back.DstToString() != clientAt {
					t.Errorf("%s: from %s, want %s", name, back.DstToString(), clientAt)
				}
				if to := netip.MustParseAddrPort(tc.to).Addr(); back.SrcIP() != to {
					t.Errorf("%s: came to %v, want %v", name, back.SrcIP(), to)
				}
				// The answers leave by the address that was asked.
				w.must(server.bind.Send(sent, back))
				for i, want := range sent {
					got := client.next()
					if !bytes.Equal(got.data, want) {
						t.Fatalf("%s: answer %d of %d: %d bytes, want %d", name, i, len(sent), len(got.data), len(want))
					}
					if got.from.DstToString() != tc.to {
						t.Fatalf("%s: answer from %s, want %s", name, got.from.DstToString(), tc.to)
					}
				}
			}
		})
	}
}

func (w *world) activated(address string) *dispatch.Generation {
	w.Helper()
	generation := w.join(address, 2)
	w.must(generation.Activate())
	return generation
}

// A source address that is not ours any more is forgotten.
func TestSourceGone(t *testing.T) {
	w := newWorld(t)
	server := w.open(w.bind(w.activated("0.0.0.0:51820")))
	defer server.close()
	client := w.open(w.bind(w.activated("127.0.0.1:51821")))
	defer client.close()
	data := []byte{4, 0, 0, 0, 1, 2, 3, 4, 5}
	w.must(client.bind.Send([][]byte{data}, client.endpoint("127.0.0.9:51820")))
	back := server.next().from
	if back.SrcToString() != "127.0.0.9" {
		t.Errorf("source %q", back.SrcToString())
	}
	back.ClearSrc()
	if back.SrcToString() != "" {
		t.Errorf("source %q after it was cleared", back.SrcToString())
	}
	w.must(server.bind.Send([][]byte{data}, back))
	if from := client.next().from.DstToString(); from != "127.0.0.1:51820" {
		t.Errorf("answer from %s", from)
	}
}

// A device closes its bind and opens it again; the sockets stay, and what came meanwhile
// does, too.
func TestReopen(t *testing.T) {
	w := newWorld(t)
	generation := w.activated("127.0.0.1:51820")
	bind := w.bind(generation)
	client, err := net.Dial("udp", "127.0.0.1:51820")
	w.must(err)
	defer client.Close()
	for i := range 20 {
		server := w.open(bind)
		if _, _, err := bind.Open(0); !errors.Is(err, conn.ErrBindAlreadyOpen) {
			t.Fatal(err)
		}
		if i > 0 {
			if got := server.next(); string(got.data) != fmt.Sprint("closed ", i-1) {
				t.Fatalf("%q came", got.data)
			}
		}
		fmt.Fprint(client, "open ", i)
		if got := server.next(); string(got.data) != fmt.Sprint("open ", i) {
			t.Fatalf("%q came", got.data)
		}
		server.close()
		w.must(bind.Close()) // again
		if err := bind.Send([][]byte{{1}}, server.endpoint("127.0.0.1:9")); !errors.Is(err, net.ErrClosed) {
			t.Fatal(err)
		}
		fmt.Fprint(client, "closed ", i)
	}
	if _, _, err := bind.Open(1234); err == nil || !strings.Contains(err.Error(), "51820") {
		t.Errorf("another port: %v", err)
	}
	functions, port, err := bind.Open(51820)
	if err != nil || port != 51820 || len(functions) != 2 {
		t.Errorf("%d functions, port %d, %v", len(functions), port, err)
	}
	w.must(bind.Close())
	// A function of an opening that is over does not read.
	if _, err := functions[0](nil, nil, nil); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

// Receivers, senders, closing and opening at once.
func TestReopenUnderLoad(t *testing.T) {
	w := newWorld(t)
	bind := w.bind(w.activated("127.0.0.1:51820"))
	peer := w.open(w.bind(w.activated("127.0.0.1:51821")))
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for range 2 {
		senders.Go(func() {
			batch := [][]byte{make([]byte, 500), make([]byte, 500), make([]byte, 200)}
			for {
				select {
				case <-stop:
					return
				default:
				}
				_ = peer.bind.Send(batch, peer.endpoint("127.0.0.1:51820"))
				_ = bind.Send(batch, peer.endpoint("127.0.0.1:51821"))
			}
		})
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for range peer.packets {
		}
	}()
	for range 20 {
		server := w.open(bind)
		server.next()
		server.close()
	}
	close(stop)
	senders.Wait()
	peer.close()
	close(peer.packets)
	<-drained
}

func handshake(kind, length int, index uint32) []byte {
	b := make([]byte, length)
	b[0] = byte(kind)
	binary.LittleEndian.PutUint32(b[4:], index)
	return b
}

// Handshake messages have their index registered; on a conflict they are not sent.
func TestIndices(t *testing.T) {
	w := newWorld(t)
	one, two := w.join("127.0.0.1:51820", 2), w.join("127.0.0.1:51820", 2)
	w.must(one.Activate())
	binds := map[*dispatch.Generation]*opened{one: w.open(w.bind(one)), two: w.open(w.bind(two))}
	for _, o := range binds {
		defer o.close()
	}
	peer, err := net.ListenPacket("udp", "127.0.0.1:0")
	w.must(err)
	defer peer.Close()
	send := func(from *dispatch.Generation, messages ...[]byte) {
		t.Helper()
		o := binds[from]
		w.must(o.bind.Send(messages, o.endpoint(peer.LocalAddr().String())))
	}
	receive := func(want []byte) {
		t.Helper()
		b := make([]byte, 2000)
		w.must(peer.SetReadDeadline(time.Now().Add(patience)))
		n, _, err := peer.ReadFrom(b)
		w.must(err)
		if !bytes.Equal(b[:n], want) {
			t.Fatalf("the peer got %x", b[:min(n, 8)])
		}
	}
	// answer is what the peer sends to the index, and who gets it.
	answer := func(index uint32, want *dispatch.Generation) {
		t.Helper()
		data := handshake(4, 48, index)
		_, err := peer.WriteTo(data, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 51820})
		w.must(err)
		if got := binds[want].next(); !bytes.Equal(got.data, data) {
			t.Fatalf("index %#x: %x came", index, got.data)
		}
	}

	send(one, handshake(1, 148, 0x0102030a))
	receive(handshake(1, 148, 0x0102030a))
	answer(0x0102030a, one)
	send(two, handshake(1, 148, 0x0b)) // staged, and yet what it begins comes to it
	receive(handshake(1, 148, 0x0b))
	answer(0x0b, two)
	w.must(two.Activate())
	answer(0x0102030a, one)
	answer(0x0c, two) // nobody's: the active generation's

	// A response, between data messages.
	send(one, handshake(4, 64, 9), handshake(2, 92, 0xd), handshake(4, 64, 8))
	receive(handshake(4, 64, 9))
	receive(handshake(2, 92, 0xd))
	receive(handshake(4, 64, 8))
	answer(0xd, one)

	// Of another generation.
	send(two, handshake(1, 148, 0xd), handshake(4, 64, 7))
	receive(handshake(4, 64, 7))
	send(one, handshake(2, 92, 0xb), handshake(4, 64, 6))
	receive(handshake(4, 64, 6))
	answer(0xd, one)
	answer(0xb, two)

	// One that is draining begins nothing, and answers.
	send(one, handshake(1, 148, 0xe), handshake(2, 92, 0xf))
	receive(handshake(2, 92, 0xf))
	answer(0xe, two)
	answer(0xf, one)

	// What only looks like one.
	for _, m := range [][]byte{handshake(1, 147, 1), handshake(1, 92, 1), handshake(2, 148, 1), handshake(3, 64, 1)} {
		send(one, m)
		receive(m)
	}
	m := handshake(1, 148, 1)
	m[2] = 1
	send(one, m)
	receive(m)
	answer(1, two)

	if got, want := binds[one].bind.Stats(), (wgbind.Stats{Announced: 3, Conflicts: 1, Withheld: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got, want := binds[two].bind.Stats(), (wgbind.Stats{Announced: 1, Conflicts: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// Without the right steering nothing is announced.
func TestOtherSteering(t *testing.T) {
	w := newWorld(t)
	group, err := dispatch.Open(dispatch.Options{Address: "127.0.0.1:51820", Service: "test", Root: w.root, Steering: dispatch.SteeringFlow})
	w.must(err)
	defer group.Close()
	generation, err := group.Join(1)
	w.must(err)
	defer generation.Close()
	o := w.open(w.bind(generation))
	defer o.close()
	if err := o.bind.Send([][]byte{handshake(1, 148, 1)}, o.endpoint("127.0.0.1:9")); !errors.Is(err, dispatch.ErrState) {
		t.Error(err)
	}
	if err := o.bind.Send(nil, &conn.StdNetEndpoint{}); !errors.Is(err, conn.ErrWrongEndpointType) {
		t.Error(err)
	}
	if _, err := o.bind.ParseEndpoint("nowhere"); err == nil {
		t.Error("an endpoint that is none")
	}
}

// tunnel is a device with a made-up network behind it.
type tunnel struct {
	*device.Device
	tun     *tuntest.ChannelTUN
	key     [32]byte
	address netip.Addr
}

func (w *world) tunnel(bind conn.Bind, key byte, address string) *tunnel {
	w.Helper()
	t := &tunnel{tun: tuntest.NewChannelTUN(), address: netip.MustParseAddr(address)}
	t.key[3] = key
	t.Device = device.NewDevice(t.tun.TUN(), bind, &device.Logger{Verbosef: device.DiscardLogf, Errorf: w.Logf})
	w.Cleanup(t.Close)
	w.must(t.IpcSet(fmt.Sprintf("private_key=%x\n", t.key)))
	return t
}

// knows makes other a peer; at is empty where it comes by itself.
func (t *tunnel) knows(w *world, other *tunnel, at string) {
	w.Helper()
	private, err := ecdh.X25519().NewPrivateKey(other.key[:])
	w.must(err)
	text := fmt.Sprintf("public_key=%s\nallowed_ip=%s/32\n", hex.EncodeToString(private.PublicKey().Bytes()), other.address)
	if at != "" {
		text += "endpoint=" + at + "\n"
	}
	w.must(t.IpcSet(text))
}

// ping sends a packet through the tunnel and waits until it comes out.
func (w *world) ping(from, to *tunnel) {
	w.Helper()
	p := tuntest.Ping(to.address, from.address)
	from.tun.Outbound <- p
	select {
	case got := <-to.tun.Inbound:
		if !bytes.Equal(got, p) {
			w.Fatal("another packet came")
		}
	case <-time.After(patience):
		w.Fatal("the packet did not come")
	}
}

// Two devices of wireguard-go, one of them on a group, and the group's next generation.
func TestDevices(t *testing.T) {
	w := newWorld(t)
	one := w.join("127.0.0.1:51820", 2)
	w.must(one.Activate())
	gateway := w.tunnel(w.bind(one), 1, "10.0.0.1")
	// Not on a socket of its own: the device opens its bind from any thread, in whatever
	// network namespace that is.
	peer := w.tunnel(w.bind(w.activated("127.0.0.1:51821")), 2, "10.0.0.2")
	gateway.knows(w, peer, "")
	peer.knows(w, gateway, "127.0.0.1:51820")
	w.must(gateway.Up())
	w.must(peer.Up())
	w.ping(peer, gateway)
	w.ping(gateway, peer)
	w.must(gateway.Down())
	w.must(gateway.Up())
	w.must(peer.Down())
	w.must(peer.Up())
	w.ping(peer, gateway)
	w.ping(gateway, peer)

	// The next generation learns where the peer is, and takes it over.
	two := w.join("127.0.0.1:51820", 2)
	state, err := gateway.IpcGet()
	w.must(err)
	_, at, _ := strings.Cut(state, "endpoint=")
	at, _, _ = strings.Cut(at, "\n")
	next := w.tunnel(w.bind(two), 1, "10.0.0.1")
	next.knows(w, peer, at)
	w.must(next.Up())
	w.must(two.Activate())
	// From inside: its handshake comes to the peer, which sends with it from then on.
	w.ping(next, peer)
	w.ping(peer, next)
	// The session with the first one is still good.
	w.ping(gateway, peer)
}
