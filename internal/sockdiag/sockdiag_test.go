// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"instar/internal/capset"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

const port = 4433

type option func(fd int) error

func reuseport(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }

func device(name string) option {
	return func(fd int) error { return unix.BindToDevice(fd, name) }
}

func v6only(on int) option {
	return func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, on) }
}

func control(options ...option) func(string, string, syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) (err error) {
		err2 := c.Control(func(fd uintptr) {
			for _, set := range options {
				err = errors.Join(err, set(int(fd)))
			}
		})
		return errors.Join(err, err2)
	}
}

func listen(t testing.TB, network, address string, options ...option) *net.UDPConn {
	t.Helper()
	lc := net.ListenConfig{Control: control(options...)}
	conn, err := lc.ListenPacket(t.Context(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	return conn.(*net.UDPConn)
}

// identity is what the socket itself says of its cookie and inode.
func identity(t testing.TB, conn *net.UDPConn) (cookie uint64, inode uint32) {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err2 := raw.Control(func(fd uintptr) {
		if cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE); err == nil {
			err = unix.Fstat(int(fd), &st)
		}
	}); err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	return cookie, uint32(st.Ino)
}

func TestUDP(t *testing.T) {
	ns := testutil.NetNS(t)
	dev := ns.AddDevice("dev", "192.0.2.1/24", "2001:db8::1/64")
	uid := uint32(os.Geteuid())

	var want []Socket
	add := func(s Socket, local string, conn *net.UDPConn) {
		t.Helper()
		s.Local = netip.MustParseAddrPort(local)
		s.UID = uid
		s.Cookie, s.Inode = identity(t, conn)
		want = append(want, s)
	}
	add(Socket{Family: unix.AF_INET}, "127.0.0.1:4433", listen(t, "udp4", "127.0.0.1:4433", reuseport))
	add(Socket{Family: unix.AF_INET}, "127.0.0.1:4433", listen(t, "udp4", "127.0.0.1:4433", reuseport))
	add(Socket{Family: unix.AF_INET}, "0.0.0.0:4433", listen(t, "udp4", "0.0.0.0:4433", reuseport))
	add(Socket{Family: unix.AF_INET, Device: dev}, "192.0.2.1:4433", listen(t, "udp4", "192.0.2.1:4433", reuseport, device("dev")))
	add(Socket{Family: unix.AF_INET6, V6Only: true}, "[::1]:4433", listen(t, "udp6", "[::1]:4433", reuseport, v6only(1)))
	add(Socket{Family: unix.AF_INET6, V6Only: true}, "[::]:4433", listen(t, "udp6", "[::]:4433", reuseport, v6only(1)))
	add(Socket{Family: unix.AF_INET6}, "[::]:4433", listen(t, "udp", "[::]:4433", reuseport, v6only(0)))
	add(Socket{Family: unix.AF_INET6, Device: dev}, "[::]:4433", listen(t, "udp", "[::]:4433", reuseport, v6only(0), device("dev")))
	// The kernel makes it V6Only.
	add(Socket{Family: unix.AF_INET6, V6Only: true}, "[2001:db8::1]:4433", listen(t, "udp6", "[2001:db8::1]:4433", reuseport, v6only(0)))

	// A connected one has a peer.
	dialer := net.Dialer{
		LocalAddr: net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.2:4433")),
		Control:   control(reuseport),
	}
	conn, err := dialer.Dial("udp4", "127.0.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	add(Socket{Family: unix.AF_INET, Peer: netip.MustParseAddrPort("127.0.0.1:53")}, "127.0.0.2:4433", conn.(*net.UDPConn))

	// These are none of it: another port, another protocol, another namespace.
	listen(t, "udp4", "127.0.0.1:4434")
	tcp, err := net.Listen("tcp4", "127.0.0.1:4433")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	other := testutil.OtherNetNS(t)
	other.Run(func() { listen(t, "udp4", "127.0.0.3:4433") })

	check := func() {
		t.Helper()
		got, err := UDP(port)
		if err != nil {
			t.Fatal(err)
		}
		byCookie := func(a, b Socket) int { return int(int64(a.Cookie) - int64(b.Cookie)) }
		slices.SortFunc(got, byCookie)
		slices.SortFunc(want, byCookie)
		if !slices.Equal(got, want) {
			t.Errorf("got\n%s\nwant\n%s", list(got), list(want))
		}
	}
	check()

	// What is closed is gone.
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	want = slices.DeleteFunc(want, func(s Socket) bool { return s.Peer.IsValid() })
	check()

	other.Run(func() {
		got, err := UDP(port)
		if err != nil || len(got) != 1 || got[0].Local != netip.MustParseAddrPort("127.0.0.3:4433") {
			t.Errorf("in the other namespace: %s, %v", list(got), err)
		}
	})
	if got, err := UDP(1); err != nil || len(got) != 0 {
		t.Errorf("a free port: %s, %v", list(got), err)
	}
}

// TCP listeners, of MPTCP too, without connections and what is bound only.
func TestTCPListeners(t *testing.T) {
	testutil.NetNS(t)
	var want []string
	for _, address := range []string{"127.0.0.1:4433", "[::1]:4433", "[::]:4433"} {
		lc := net.ListenConfig{Control: control(reuseport)}
		lc.SetMultipathTCP(address == "[::]:4433")
		l, err := lc.Listen(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		want = append(want, address)
	}
	client, err := net.Dial("tcp", "127.0.0.1:4433")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	bound, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(bound) }()
	if err := errors.Join(reuseport(bound), unix.Bind(bound, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 2}})); err != nil {
		t.Fatal(err)
	}
	listen(t, "udp4", "127.0.0.3:4433")
	sockets, err := TCPListeners(port)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range sockets {
		got = append(got, s.Local.String())
		if s.Peer.IsValid() || s.Cookie == 0 || s.Device != 0 {
			t.Errorf("%+v", s)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func list(sockets []Socket) string {
	var b strings.Builder
	for _, s := range sockets {
		fmt.Fprintf(&b, "\t%+v\n", s)
	}
	return b.String()
}

// More sockets than fit into one message of the kernel's.
func TestMany(t *testing.T) {
	testutil.NetNS(t)
	want := map[uint64]uint32{}
	for range 300 {
		cookie, inode := identity(t, listen(t, "udp4", "127.0.0.1:4433", reuseport))
		want[cookie] = inode
	}
	got, err := UDP(port)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Errorf("%d sockets, want %d", len(got), len(want))
	}
	for _, s := range got {
		if inode, ok := want[s.Cookie]; !ok || inode != s.Inode {
			t.Errorf("unexpected %+v", s)
		}
	}
}

// Without privileges, in the namespace that the tests run in.
func TestUnprivileged(t *testing.T) {
	conn := listen(t, "udp4", "127.0.0.1:0")
	cookie, inode := identity(t, conn)
	got, err := UDP(conn.LocalAddr().(*net.UDPAddr).AddrPort().Port())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(got, func(s Socket) bool { return s.Cookie == cookie && s.Inode == inode && s.UID == uint32(os.Geteuid()) }) {
		t.Errorf("cookie %d, inode %d is not in\n%s", cookie, inode, list(got))
	}
}

// holder binds a socket, tells of it, and lists sockets and owners on demand.
var holder = testutil.NewProgram("holder", func(c *testutil.Conversation) error {
	conn, err := net.ListenPacket("udp4", c.Args[0])
	if err != nil {
		return err
	}
	defer conn.Close()
	c.Send("bound")
	for {
		line, ok := c.Recv()
		if !ok {
			return nil
		}
		var inode uint32
		if _, err := fmt.Sscan(line, &inode); err != nil {
			return err
		}
		sockets, err := UDP(port)
		if err != nil {
			return err
		}
		c.Send("%d sockets, owners %v", len(sockets), Owners(inode)[inode])
	}
})

func TestOtherUser(t *testing.T) {
	testutil.Need(t, capset.SysPtrace)
	testutil.NetNS(t)
	p := holder.Start(t, testutil.Options{Args: []string{"127.0.0.1:4433"}, As: testutil.Nobody()})
	p.Expect("bound")
	mine := listen(t, "udp4", "127.0.0.2:4433")
	_, inode := identity(t, mine)

	got, err := UDP(port)
	if err != nil || len(got) != 2 {
		t.Fatal(list(got), err)
	}
	inodes := map[uint32]uint32{} // by user
	for _, s := range got {
		inodes[s.UID] = s.Inode
	}
	theirs, ok := inodes[65534]
	if !ok || inodes[0] != inode {
		t.Fatalf("users 65534 and 0 with inode %d, got\n%s", inode, list(got))
	}

	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	me := Process{os.Getpid(), strings.TrimSpace(string(comm))}
	child := Process{p.PID, "exe"} // from /proc/self/exe
	owners := Owners(theirs, inode, 1<<31)
	if len(owners) != 2 || !slices.Equal(owners[inode], []Process{me}) || !slices.Equal(owners[theirs], []Process{child}) {
		t.Errorf("owners %v, want %d: %v, %d: %v", owners, inode, me, theirs, child)
	}

	// An unprivileged process sees all sockets and its own descriptors only.
	if got, want := p.Ask("%d", theirs), fmt.Sprintf("2 sockets, owners [%v]", child); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := p.Ask("%d", inode), "2 sockets, owners []"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// Two descriptors in one process are one owner; two processes are two.
func TestOwnersShared(t *testing.T) {
	conn := listen(t, "udp4", "127.0.0.1:0")
	f, err := conn.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p := holder.Start(t, testutil.Options{Args: []string{"127.0.0.1:0"}, Files: []*os.File{f}})
	p.Expect("bound")
	_, inode := identity(t, conn)
	var pids []int
	for _, o := range Owners(inode)[inode] {
		pids = append(pids, o.PID)
	}
	want := []int{os.Getpid(), p.PID}
	slices.Sort(want)
	if !slices.Equal(pids, want) {
		t.Errorf("owners %v, want %v", pids, want)
	}
	if got := Owners(); len(got) != 0 {
		t.Errorf("owners of nothing: %v", got)
	}
	if got := (Process{7, "init"}).String(); got != "init (pid 7)" {
		t.Error(got)
	}
	if got := command(filepath.Join(t.TempDir(), "gone")); got != "?" {
		t.Errorf("the name of a process that ended is %q", got)
	}
}

func TestParseRefuses(t *testing.T) {
	whole := make([]byte, sizeofMessage)
	whole[0] = unix.AF_INET
	if _, err := parse(whole); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{
		"nothing":               nil,
		"short":                 whole[:sizeofMessage-1],
		"another family":        append([]byte{unix.AF_UNIX}, whole[1:]...),
		"a truncated attribute": append(slices.Clone(whole), 0xff, 0xff, attrV6Only, 0),
	} {
		if s, err := parse(b); err == nil {
			t.Errorf("%s: %+v, want an error", name, s)
		}
	}
}

func TestParseAttributes(t *testing.T) {
	message := make([]byte, sizeofMessage)
	message[0] = unix.AF_INET6
	other := []byte{5, 0, 8, 0, 0xff, 0, 0, 0}
	on := []byte{5, 0, attrV6Only, 0, 1, 0, 0, 0}
	for name, tc := range map[string]struct {
		attributes []byte
		want       bool
	}{
		"none":           {nil, false},
		"on":             {on, true},
		"off":            {[]byte{5, 0, attrV6Only, 0, 0, 0, 0, 0}, false},
		"no padding":     {on[:5], true},
		"no value":       {[]byte{4, 0, attrV6Only, 0}, false},
		"after others":   {slices.Concat(other, other, on), true},
		"among others":   {slices.Concat(other, on, other), true},
		"others":         {other, false},
		"trailing bytes": {slices.Concat(on, []byte{1, 2, 3}), true},
	} {
		s, err := parse(slices.Concat(message, tc.attributes))
		if err != nil || s.V6Only != tc.want {
			t.Errorf("%s: V6Only %t, %v; want %t", name, s.V6Only, err, tc.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	whole := make([]byte, sizeofMessage)
	whole[0] = unix.AF_INET6
	f.Add(whole)
	f.Add(slices.Concat(whole, []byte{5, 0, attrV6Only, 0, 1, 0, 0, 0}))
	f.Add(slices.Concat(whole, []byte{5, 0, attrV6Only, 0, 1}))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parse(b)
		if err == nil && s.Family != unix.AF_INET && s.Family != unix.AF_INET6 {
			t.Errorf("family %d", s.Family)
		}
	})
}
