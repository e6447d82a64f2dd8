// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"instar/dispatch/connid"
	"instar/internal/capset"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// patience is how long a test waits for what should take microseconds.
const patience = 10 * time.Second

// random gives reproducible numbers and octets.
type random struct {
	*rand.Rand
	source *rand.ChaCha8
}

func seeded(name string) random {
	var seed [32]byte
	copy(seed[:], name)
	source := rand.NewChaCha8(seed)
	return random{rand.New(source), source}
}

func (r random) octets(n int) []byte {
	b := make([]byte, n)
	r.source.Read(b)
	return b
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func seededKeys(t testing.TB, r random) connid.Keys {
	t.Helper()
	keys, err := connid.KeysFromBytes(r.octets(connid.KeysLen))
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// secretsOf are keys as the data plane reads them.
func secretsOf(k connid.Keys) Secrets {
	return Secrets{
		Cid:           [2]uint64{binary.LittleEndian.Uint64(k.CID[:]), binary.LittleEndian.Uint64(k.CID[8:])},
		MulHandle:     k.MulHandle,
		MulGeneration: k.MulGeneration,
		Affinity:      [2]uint64{binary.LittleEndian.Uint64(k.Affinity[:]), binary.LittleEndian.Uint64(k.Affinity[8:])},
	}
}

// codecOf is the codec for prefixes of a length.
func codecOf(t testing.TB, keys connid.Keys, prefix int) *connid.Codec {
	t.Helper()
	var lb *connid.LoadBalancer
	if prefix != PrefixMin {
		lb = &connid.LoadBalancer{ConfigRotation: 1, ServerID: make([]byte, prefix-1-6), NonceLen: 6}
		if prefix == PrefixMin+1 {
			lb.ServerID, lb.NonceLen = make([]byte, 3), 5
		}
	}
	c, err := connid.New(keys, lb)
	if err != nil {
		t.Fatal(err)
	}
	if c.PrefixLen() != prefix {
		t.Fatalf("codec has prefixes of %d octets, want %d", c.PrefixLen(), prefix)
	}
	return c
}

// seal makes the ID of a socket under a random prefix.
func seal(t testing.TB, c *connid.Codec, r random, h connid.Handle, generation uint32) []byte {
	t.Helper()
	prefix := r.octets(c.PrefixLen())
	prefix[0] = prefix[0]&0xe0 | c.FirstOctet()&0x1f
	cid, err := c.Seal(prefix, h, generation)
	if err != nil {
		t.Fatal(err)
	}
	return cid
}

// Versions of QUIC that clients send, and one that nobody knows.
const (
	versionNegotiation = 0x00000000
	version1           = 0x00000001
	version2           = 0x6b3343cf
	versionGrease      = 0x1a2a3a4a
)

// longHeader is a packet of any version to dcid.
func longHeader(version uint32, dcid []byte, rest ...byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0xc3}, version)
	b = append(b, byte(len(dcid)))
	b = append(b, dcid...)
	return append(b, rest...)
}

// shortHeader is a packet to dcid, long enough to be taken for one.
func shortHeader(dcid []byte, rest ...byte) []byte {
	return append(append([]byte{0x41}, dcid...), rest...)
}

// initial is a client's first packet in its usual size.
func initial(dcid []byte) []byte {
	b := longHeader(version1, dcid, 0)
	return append(b, make([]byte, 1200-len(b))...)
}

// needBPF skips the test unless it may load programs.
func needBPF(t testing.TB) {
	t.Helper()
	testutil.Need(t, capset.BPF, capset.NetAdmin, capset.Perfmon)
	// Before 5.11 maps are counted as locked memory.
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
}

// mapped is the value of a data section in the memory that the program uses.
func mapped[T any](t testing.TB, m *ebpf.Map) *T {
	t.Helper()
	size := int(unsafe.Sizeof(*new(T)))
	if int(m.ValueSize()) != size {
		t.Fatalf("value of %v has %d bytes, want %d", m, m.ValueSize(), size)
	}
	memory, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatalf("map the memory of %v: %v", m, err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(memory); err != nil {
			t.Error(err)
		}
	})
	return (*T)(unsafe.Pointer(&memory[0]))
}

func load(t testing.TB, spec *ebpf.CollectionSpec, opts ebpf.CollectionOptions) *ebpf.Collection {
	t.Helper()
	coll, err := ebpf.NewCollectionWithOptions(spec, opts)
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	t.Cleanup(coll.Close)
	return coll
}

// counts is what the data plane counted.
type counts struct {
	verdicts [Verdicts]uint64
	slots    [MaxSlots]uint64
}

func (c counts) total() (n uint64) {
	for _, v := range c.verdicts {
		n += v
	}
	return n
}

func (c counts) minus(d counts) counts {
	for i := range c.verdicts {
		c.verdicts[i] -= d.verdicts[i]
	}
	for i := range c.slots {
		c.slots[i] -= d.slots[i]
	}
	return c
}

// String lists everything that is not zero: "new=3 drop=1 slot2=3".
func (c counts) String() string {
	var words []string
	for i, n := range c.verdicts {
		if n != 0 {
			words = append(words, fmt.Sprintf("%s=%d", VerdictNames[i], n))
		}
	}
	for i, n := range c.slots {
		if n != 0 {
			words = append(words, fmt.Sprintf("slot%d=%d", i, n))
		}
	}
	return strings.Join(words, " ")
}

// group is a data plane on real sockets in the network namespace of the calling
// goroutine.
type group struct {
	t         testing.TB
	config    Config
	coll      *ebpf.Collection
	program   *ebpf.Program
	control   *Control
	keys      connid.Keys
	codec     *connid.Codec
	random    random
	address   netip.AddrPort // port 0 until the first socket is bound
	sockets   map[connid.Handle]int
	bystander int // bound like the others and not registered: nothing may reach it
	client    int
}

const closed = -1

var (
	loopback4 = netip.MustParseAddr("127.0.0.1")
	loopback6 = netip.MustParseAddr("::1")
)

// quicConfig is a small QUIC group.
var quicConfig = Config{Steering: SteeringQUIC, MaxGenerations: 8, MaxWorkers: 16, FlowEntries: 4096, Prefix: PrefixMin}

func newGroup(t testing.TB, c Config, host netip.Addr) *group {
	t.Helper()
	needBPF(t)
	spec, name, err := Spec(c)
	if err != nil {
		t.Fatal(err)
	}
	coll := load(t, spec, ebpf.CollectionOptions{})
	g := &group{
		config:    c,
		coll:      coll,
		program:   coll.Programs[name],
		control:   mapped[Control](t, coll.Maps[MapControl]),
		keys:      seededKeys(t, seeded("keys of "+t.Name())),
		bystander: closed,
		client:    closed,
	}
	g.codec = codecOf(t, g.keys, c.Prefix)
	if err := coll.Maps[MapSecrets].Put(uint32(0), secretsOf(g.keys)); err != nil {
		t.Fatal(err)
	}
	g.reset(t, host)
	t.Cleanup(g.closeAll)
	return g
}

// reset makes the group as good as new, at most its counters go on. Loading the
// program takes far longer.
func (g *group) reset(t testing.TB, host netip.Addr) {
	t.Helper()
	g.t = t
	g.closeAll()
	*g.control = Control{}
	if flows := g.coll.Maps[MapFlows]; flows != nil {
		var keys [][]byte
		var key, value []byte
		for i := flows.Iterate(); i.Next(&key, &value); {
			keys = append(keys, slices.Clone(key))
		}
		for _, key := range keys {
			if err := flows.Delete(key); err != nil {
				t.Fatal(err)
			}
		}
	}
	g.random = seeded(t.Name())
	g.address = netip.AddrPortFrom(host, 0)
	g.client = openSocket(t, host)
	g.sockets = make(map[connid.Handle]int)
}

func (g *group) closeAll() {
	for h := range g.sockets {
		g.close(h)
	}
	for _, fd := range []*int{&g.bystander, &g.client} {
		if *fd == closed {
			continue
		}
		if err := unix.Close(*fd); err != nil {
			g.t.Error(err)
		}
		*fd = closed
	}
}

// newClient makes the following datagrams come from another port.
func (g *group) newClient() {
	g.t.Helper()
	if err := unix.Close(g.client); err != nil {
		g.t.Fatal(err)
	}
	g.client = openSocket(g.t, g.address.Addr())
}

func openSocket(t testing.TB, host netip.Addr) int {
	t.Helper()
	family := unix.AF_INET
	if host.Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// bindSocket makes a member of the reuseport group of an address.
func bindSocket(t testing.TB, address netip.AddrPort) int {
	t.Helper()
	fd := openSocket(t, address.Addr())
	err := errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
		unix.Bind(fd, sockaddr(address)))
	if err != nil {
		t.Fatalf("bind %v: %v", address, errors.Join(err, unix.Close(fd)))
	}
	return fd
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// join binds and registers the workers of a generation.
func (g *group) join(slot uint8, number uint32, workers int) {
	g.t.Helper()
	for w := range workers {
		g.bind(connid.MakeHandle(slot, uint8(w)))
	}
	g.control.Slots[slot] = Slot{Number: number, Workers: uint16(workers)}
}

// bind makes a socket and registers it.
func (g *group) bind(h connid.Handle) {
	g.t.Helper()
	must := func(what string, err error) {
		g.t.Helper()
		if err != nil {
			g.t.Fatalf("%s of %v: %v", what, h, err)
		}
	}
	if g.bystander == closed {
		g.bystander = bindSocket(g.t, g.address)
		sa, err := unix.Getsockname(g.bystander)
		must("get address", err)
		port := 0
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			port = sa.Port
		case *unix.SockaddrInet6:
			port = sa.Port
		}
		g.address = netip.AddrPortFrom(g.address.Addr(), uint16(port))
		must("attach the program", unix.SetsockoptInt(g.bystander, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, g.program.FD()))
	}
	fd := bindSocket(g.t, g.address)
	g.sockets[h] = fd
	index := uint32(h.Slot())*uint32(g.config.MaxWorkers) + uint32(h.Worker())
	must("register", g.coll.Maps[MapSockets].Put(index, uint64(fd)))

	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	must("get the cookie", err)
	var registered uint64
	must("look up", g.coll.Maps[MapSockets].Lookup(index, &registered))
	if registered != cookie {
		g.t.Fatalf("%v is registered with cookie %#x, want %#x", h, registered, cookie)
	}
}

// close closes a socket; the kernel takes it out of the map.
func (g *group) close(handles ...connid.Handle) {
	g.t.Helper()
	for _, h := range handles {
		fd, ok := g.sockets[h]
		if !ok {
			g.t.Fatalf("%v has no socket", h)
		}
		delete(g.sockets, h)
		if err := unix.Close(fd); err != nil {
			g.t.Error(err)
		}
	}
}

// closeSlot closes all sockets of a generation.
func (g *group) closeSlot(slot uint8) {
	g.t.Helper()
	for h := range g.sockets {
		if h.Slot() == slot {
			g.close(h)
		}
	}
}

// word is control.active for a generation, with the order at an index.
func (g *group) word(slot uint8, order int) uint64 {
	s := g.control.Slots[slot]
	return uint64(s.Number) | uint64(slot)<<32 | uint64(order)<<40 | uint64(s.Workers)<<48
}

// setOrder writes an order of last resort.
func (g *group) setOrder(index int, activated, staged []uint8) {
	o := &g.control.Orders[index]
	o.Activated = uint16(len(activated))
	o.Total = uint16(len(activated) + len(staged))
	copy(o.Slot[:], slices.Concat(activated, staged))
}

func (g *group) activate(word uint64) { atomic.StoreUint64(&g.control.Active, word) }

func (g *group) send(datagram []byte) {
	g.t.Helper()
	sendTo(g.t, g.client, g.address, datagram)
}

func sendTo(t testing.TB, fd int, to netip.AddrPort, datagram []byte) {
	t.Helper()
	if err := unix.Sendto(fd, datagram, 0, sockaddr(to)); err != nil {
		t.Fatalf("send %d bytes to %v: %v", len(datagram), to, err)
	}
}

// counted reads the counters, the sum of all CPUs.
func (g *group) counted() counts {
	g.t.Helper()
	c, err := g.count()
	if err != nil {
		g.t.Fatal(err)
	}
	return c
}

// count is counted for goroutines that may not end the test.
func (g *group) count() (c counts, err error) {
	var all []Counters
	if err := g.coll.Maps[MapVerdicts].Lookup(uint32(0), &all); err != nil {
		return c, err
	}
	for _, cpu := range all {
		for i, n := range cpu.Verdicts {
			c.verdicts[i] += n
		}
		for i := range cpu.Slots {
			c.slots[i] += cpu.Slots[i].Packets
		}
	}
	return c, nil
}

// received is a datagram and the socket that has it.
type received struct {
	by       connid.Handle
	datagram []byte
}

// receive waits for n datagrams, and looks whether there are more.
func (g *group) receive(n int) []received {
	g.t.Helper()
	var all []received
	buf := make([]byte, 1<<16)
	read := func() {
		for h, fd := range g.sockets {
			for {
				size, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
				if errors.Is(err, unix.EAGAIN) {
					break
				}
				if err != nil {
					g.t.Fatalf("receive at %v: %v", h, err)
				}
				all = append(all, received{h, slices.Clone(buf[:size])})
			}
		}
	}
	deadline := time.Now().Add(patience)
	for read(); len(all) < n; read() {
		if time.Now().After(deadline) {
			g.t.Fatalf("received %d datagrams, want %d; counted: %v", len(all), n, g.counted())
		}
		g.poll(time.Second)
	}
	read()
	if len(all) > n {
		g.t.Fatalf("received %d datagrams, want %d", len(all), n)
	}
	if g.bystander != closed {
		if n, _, err := unix.Recvfrom(g.bystander, buf, unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
			g.t.Errorf("a socket that is not registered got %d bytes, %v", n, err)
		}
	}
	return all
}

// poll waits until a socket can be read.
func (g *group) poll(timeout time.Duration) {
	g.t.Helper()
	fds := make([]unix.PollFd, 0, len(g.sockets))
	for _, fd := range g.sockets {
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	if _, err := unix.Poll(fds, int(timeout.Milliseconds())); err != nil && !errors.Is(err, unix.EINTR) {
		g.t.Fatal(err)
	}
}

// steer sends a datagram and waits until the data plane has counted it and a
// socket has it. It returns that socket as slot/worker, "none" for a datagram
// that was dropped, and what was counted.
func (g *group) steer(datagram []byte) (socket, counted string) {
	g.t.Helper()
	before := g.counted()
	g.send(datagram)
	return g.arrived(datagram, before)
}

func (g *group) arrived(datagram []byte, before counts) (socket, counted string) {
	g.t.Helper()
	g.waitCounted(before.total() + 1)
	delta := g.counted().minus(before)
	if delta.verdicts[VerdictDrop] > 0 {
		g.receive(0)
		return "none", delta.String()
	}
	got := g.receive(1)[0]
	if !slices.Equal(got.datagram, datagram) {
		g.t.Fatalf("received %x, want %x", got.datagram, datagram)
	}
	return got.by.String(), g.counted().minus(before).String()
}

// waitCounted waits until at least n packets were counted.
func (g *group) waitCounted(n uint64) {
	g.t.Helper()
	testutil.WaitFor(g.t, patience, func() bool { return g.counted().total() >= n }, "%d packets to be counted", n)
}

// flow is what the flow table remembers of a client's connection ID.
func (g *group) flow(dcid []byte) (f Flow, ok bool) {
	g.t.Helper()
	err := g.coll.Maps[MapFlows].Lookup(g.keys.AffinityHash(dcid), &f)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return f, false
	}
	if err != nil {
		g.t.Fatal(err)
	}
	return f, true
}

func (g *group) setFlow(dcid []byte, f Flow) {
	g.t.Helper()
	if err := g.coll.Maps[MapFlows].Put(g.keys.AffinityHash(dcid), f); err != nil {
		g.t.Fatal(err)
	}
}

// share is the worker that a new handshake is for, as long as that one lives.
func (g *group) share(dcid []byte, workers int) uint8 {
	return uint8(g.keys.AffinityHash(dcid) >> 32 * uint64(workers) >> 32)
}

// chiSquare is the statistic of observed counts that should all be equal.
func chiSquare(observed []int) (x float64) {
	n := 0
	for _, o := range observed {
		n += o
	}
	want := float64(n) / float64(len(observed))
	for _, o := range observed {
		d := float64(o) - want
		x += d * d / want
	}
	return x
}

// chiSquareLimit is the value that the statistic of n equally likely counts
// exceeds once in a million.
var chiSquareLimit = map[int]float64{2: 23.93, 3: 27.63, 4: 30.66, 5: 33.38, 8: 40.52, 11: 46.86, 12: 48.87}

func wantUniform(t testing.TB, what string, observed []int) {
	t.Helper()
	limit, ok := chiSquareLimit[len(observed)]
	if !ok {
		t.Fatalf("no limit for %d counts", len(observed))
	}
	if x := chiSquare(observed); x > limit {
		t.Errorf("%s: %v is not uniform: chi-square %.1f, at most %.1f", what, observed, x, limit)
	}
}

// token marks datagram i of a series in its last octets.
func token(datagram []byte, i int) []byte {
	binary.BigEndian.PutUint64(datagram[len(datagram)-8:], uint64(i))
	return datagram
}

func tokenOf(datagram []byte) int {
	return int(binary.BigEndian.Uint64(datagram[len(datagram)-8:]))
}
