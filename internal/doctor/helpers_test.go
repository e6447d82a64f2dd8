// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/handover"
	"instar/internal/capset"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// machine is a network namespace and a bpffs.
type machine struct {
	*testing.T
	ns   *testutil.Netns
	root string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	testutil.NeedRoot(t)
	return &machine{t, testutil.NetNS(t), filepath.Join(testutil.BPFFS(t), "instar")}
}

func (m *machine) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

func (m *machine) options(network, address string) dispatch.Options {
	return dispatch.Options{Network: network, Address: address, Root: m.root, Service: "test", MaxGenerations: 4, Workers: 4, FlowEntries: 64}
}

func (m *machine) open(o dispatch.Options) *dispatch.Group {
	m.Helper()
	g, err := dispatch.Open(o)
	m.must(err)
	m.Cleanup(func() { m.must(g.Close()) })
	return g
}

// serve opens a group with an active generation.
func (m *machine) serve(network, address string) (*dispatch.Group, *dispatch.Generation) {
	m.Helper()
	g := m.open(m.options(network, address))
	n, err := g.Join(2)
	m.must(err)
	m.Cleanup(func() { m.must(n.Close()) })
	m.must(n.Activate())
	return g, n
}

// setOption sets an option of the generation's first socket.
func (m *machine) setOption(n *dispatch.Generation, level, name int) {
	m.Helper()
	raw, err := n.Conns()[0].SyscallConn()
	m.must(err)
	var failed error
	m.must(raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), level, name, 1) }))
	m.must(failed)
}

// program binds sockets as a process of its own: "NETWORK ADDRESS" each. It says
// "bound", and holds them until it is told to end.
var program = testutil.NewProgram("sockets", func(c *testutil.Conversation) error {
	var bound []any // what nobody refers to is closed by the collector
	for i := 0; i+1 < len(c.Args); i += 2 {
		config := net.ListenConfig{Control: reusePort}
		config.SetMultipathTCP(false)
		var s any
		var err error
		if strings.HasPrefix(c.Args[i], "tcp") {
			s, err = config.Listen(context.Background(), c.Args[i], c.Args[i+1])
		} else {
			s, err = config.ListenPacket(context.Background(), c.Args[i], c.Args[i+1])
		}
		if err != nil {
			return err
		}
		bound = append(bound, s)
	}
	c.Send("bound")
	c.Recv()
	runtime.KeepAlive(bound)
	return nil
})

// reusePort sets SO_REUSEPORT.
func reusePort(_, _ string, raw syscall.RawConn) (err error) {
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	return errors.Join(cerr, err)
}

// bind has a process bind sockets with SO_REUSEPORT.
func (m *machine) bind(as *testutil.Identity, sockets ...string) {
	m.Helper()
	program.Start(m, testutil.Options{Args: sockets, NS: m.ns, As: as}).Expect("bound")
}

// server joins a group and activates its generation. It becomes another user when it is
// told.
var server = testutil.NewProgram("server", func(c *testutil.Conversation) error {
	g, err := dispatch.Open(dispatch.Options{Address: c.Args[1], Root: c.Args[0], Service: "test"})
	if err != nil {
		return err
	}
	n, err := g.Join(2)
	if err == nil {
		err = n.Activate()
	}
	if err != nil {
		return err
	}
	c.Send("serves")
	if line, _ := c.Recv(); line == "become nobody" {
		if err := syscall.Setresuid(65534, 65534, 65534); err != nil { // of all threads
			return err
		}
		c.Send("became nobody")
		c.Recv()
	}
	runtime.KeepAlive(n)
	return nil
})

// limited examines a process that may lock as much memory as it likes, where the test may, and
// then 64 KiB.
var limited = testutil.NewProgram("limited", func(c *testutil.Conversation) error {
	tell := func(prepare ...func() error) error {
		done := make(chan error)
		go func() {
			runtime.LockOSThread()
			for _, f := range append(prepare, uname26) {
				if err := f(); err != nil {
					done <- err
					return
				}
			}
			for _, f := range Examine(context.Background(), Options{Root: c.Args[0]}) {
				if f.Check == "memlock" {
					c.Send("%s: %s -> %s", f.Result, f.Reason, f.Cure)
				}
			}
			done <- nil
		}()
		return <-done
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &before); err != nil {
		return err
	}
	if before.Max == unix.RLIM_INFINITY {
		if err := tell(drop(groupCapabilities...)); err != nil {
			return err
		}
	} else {
		c.Send("the hard limit is %d", before.Max)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: 64 << 10}); err != nil {
		return err
	}
	return tell(drop(groupCapabilities...))
})

// app is a server that hands over, with a group. It binds what it is told to.
var app = testutil.NewProgram("app", func(c *testutil.Conversation) (err error) {
	ctx, dir := context.Background(), c.Args[1]
	h, err := handover.New(handover.Options{Socket: filepath.Join(dir, "app.sock"), Name: "app"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	_, err = h.Listen("web", "tcp", "127.0.0.1:8080")
	if err == nil {
		_, err = h.ListenPacket("dns", "udp", "127.0.0.1:53")
	}
	if err == nil {
		_, err = h.Listen("local", "unix", filepath.Join(dir, "local.sock"))
	}
	if err != nil {
		return err
	}
	g, err := dispatch.Open(dispatch.Options{Address: "127.0.0.1:4433", Root: c.Args[0], Service: "test"})
	if err != nil {
		return err
	}
	n, err := g.Join(2) // each generation has its own
	if err == nil {
		err = errors.Join(n.Activate(), h.Ready(ctx))
	}
	if err != nil {
		return err
	}
	c.Send("ready")
	var bound []any
	for line, ok := c.Recv(); ok; line, ok = c.Recv() {
		network, address, _ := strings.Cut(line, " ")
		var s any
		if network == "udp" {
			s, err = net.ListenPacket(network, address)
		} else {
			s, err = net.Listen(network, address)
		}
		if err != nil {
			return err
		}
		bound = append(bound, s)
		c.Send("bound")
	}
	runtime.KeepAlive(bound)
	runtime.KeepAlive(n)
	return nil
})

// examine is Examine of the machine, in its network namespace. prepare changes what is of
// the thread first: it ends with the examination.
func (m *machine) examine(o Options, prepare ...func() error) findings {
	m.Helper()
	if o.Root == "" {
		o.Root = m.root
	}
	return examine(m, o, append([]func() error{func() error { return unix.Setns(m.ns.FD(), unix.CLONE_NEWNET) }}, prepare...)...)
}

// examine is Examine on a thread of its own.
func examine(t testing.TB, o Options, prepare ...func() error) findings {
	t.Helper()
	type result struct {
		found []Finding
		err   error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		for _, f := range prepare {
			if err := f(); err != nil {
				done <- result{err: err}
				return
			}
		}
		done <- result{found: Examine(context.Background(), o)}
	}()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	return r.found
}

type findings []Finding

// of are the findings of one check.
func (f findings) of(check string) findings {
	return slices.DeleteFunc(slices.Clone(f), func(f Finding) bool { return f.Check != check })
}

// want checks that a check found one thing and nothing else: its result, and words of its
// reason and of its cure.
func (f findings) want(t testing.TB, check string, result Result, reason, cure string) {
	t.Helper()
	found := f.of(check)
	if len(found) != 1 {
		t.Errorf("%s has %d findings, want 1: %v", check, len(found), found)
		return
	}
	if got := found[0]; got.Result != result || !strings.Contains(got.Reason, reason) || !strings.Contains(got.Cure, cure) || (cure == "") != (got.Cure == "") {
		t.Errorf("%s: %s: %s\n\t-> %s\nwant %s: %s\n\t-> %s", check, got.Result, got.Reason, got.Cure, result, reason, cure)
	}
}

// wantOK checks that checks are content.
func (f findings) wantOK(t testing.TB, checks ...string) {
	t.Helper()
	for _, check := range checks {
		f.want(t, check, OK, "", "")
	}
}

// Things to prepare, each for the calling thread.

// uname26 makes the kernel say to be a Linux 2.6 (personality(2), UNAME26).
func uname26() error {
	if _, _, errno := unix.RawSyscall(unix.SYS_PERSONALITY, 0x0020000, 0, 0); errno != 0 {
		return fmt.Errorf("personality: %w", errno)
	}
	return nil
}

// drop takes capabilities away, all but some.
func drop(keep ...capset.Cap) func() error {
	return func() error {
		kept := capset.Of(keep...)
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		data := [2]unix.CapUserData{
			{Effective: uint32(kept), Permitted: uint32(kept)},
			{Effective: uint32(kept >> 32), Permitted: uint32(kept >> 32)},
		}
		return unix.Capset(&header, &data[0])
	}
}

// becomeNobody gives up root and all capabilities.
func becomeNobody() error {
	for _, call := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} {
		if _, _, errno := unix.RawSyscall(call, 65534, 65534, 65534); errno != 0 {
			return errno
		}
	}
	return nil
}

// over puts a file with the content in the place of another one, for this thread.
func over(t testing.TB, path, content string) func() error {
	file := filepath.Join(t.TempDir(), "file")
	return func() error {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			return err
		}
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
		return os.NewSyscallError("mount", unix.Mount(file, path, "", unix.MS_BIND, ""))
	}
}

// refuse installs a seccomp filter that answers bpf(2) with an error: all of it, or one
// command.
func refuse(answer unix.Errno, command ...uint32) func() error {
	const allow, errno = 0x7fff0000, 0x00050000
	number := uint32(unix.SYS_BPF)
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // seccomp_data.nr
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: number, Jt: 1},
		{Code: unix.BPF_RET, K: allow},
	}
	if len(command) > 0 {
		filter = append(filter,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 16}, // seccomp_data.args[0], lower half
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: command[0], Jt: 1},
			unix.SockFilter{Code: unix.BPF_RET, K: allow})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET, K: errno | uint32(answer)})
	return func() error {
		program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return os.NewSyscallError("prctl", err)
		}
		return os.NewSyscallError("prctl", unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0))
	}
}
