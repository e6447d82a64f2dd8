// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"instar/internal/capset"
	"instar/internal/kernel"
)

func TestMain(m *testing.M) { Main(m) }

// attempt is a test inside a test: it records how it ended.
type attempt struct {
	testing.TB
	failed, skipped bool
	message         string
}

func (a *attempt) Helper() {}
func (a *attempt) Fatal(args ...any) {
	a.failed, a.message = true, fmt.Sprint(args...)
	runtime.Goexit()
}
func (a *attempt) Fatalf(format string, args ...any) { a.Fatal(fmt.Sprintf(format, args...)) }
func (a *attempt) Skipf(format string, args ...any) {
	a.skipped, a.message = true, fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// try runs f as a test would be run.
func try(t *testing.T, f func(t testing.TB)) *attempt {
	a := &attempt{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(a)
	}()
	<-done
	return a
}

func netnsInode(t testing.TB) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func mainInode(t testing.TB) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestNetNS(t *testing.T) {
	Need(t, capset.SysAdmin, capset.NetAdmin)
	outside := netnsInode(t)
	var inside uint64
	t.Run("in", func(t *testing.T) {
		ns := NetNS(t)
		inside = netnsInode(t)
		if inside == outside {
			t.Fatal("NetNS left the test in the namespace it was in")
		}
		if got := mainInode(t); got != outside {
			t.Error("the main thread is in the namespace of the test")
		}
		ns.Run(func() {
			if got := netnsInode(t); got != inside {
				t.Error("Run is in another namespace")
			}
		})
		if got := netnsInode(t); got != inside {
			t.Error("Run left the namespace")
		}

		// lo is up, and it is the only device.
		links, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		if len(links) != 1 || links[0].Attrs().Name != "lo" || links[0].Attrs().Flags&net.FlagUp == 0 {
			t.Errorf("devices: %+v, want lo, up", links)
		}
		for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
			c, err := net.ListenPacket("udp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.WriteTo([]byte("x"), c.LocalAddr()); err != nil {
				t.Errorf("send to %s: %v", c.LocalAddr(), err)
			}
		}
		t.Run("nested", func(t *testing.T) {
			if netnsInode(t) == inside {
				t.Error("a subtest is in the namespace without Run: the comment on NetNS is wrong")
			}
			ns.Run(func() {
				if netnsInode(t) != inside {
					t.Error("Run does not bring a subtest into the namespace")
				}
			})
			if got := netnsInode(t); got != outside {
				t.Error("Run did not bring the subtest back")
			}
		})
	})
	if got := netnsInode(t); got != outside {
		t.Error("the namespace outlived its test on this thread")
	}
}

// Each thread that was in a namespace comes back or ends.
func TestNetNSRestoresThreads(t *testing.T) {
	Need(t, capset.SysAdmin, capset.NetAdmin)
	outside := netnsInode(t)
	for range 20 {
		t.Run("", func(t *testing.T) { NetNS(t) })
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(tasks) == 0 {
		t.Fatal(tasks, err)
	}
	for _, task := range tasks {
		WaitFor(t, 10*time.Second, func() bool {
			var st unix.Stat_t
			return unix.Stat(task, &st) != nil || st.Ino == outside
		}, "%s to leave the namespace of a test, or to end", task)
	}
}

func TestRunFatal(t *testing.T) {
	ns := OtherNetNS(t)
	here := make(chan uint64, 1)
	a := try(t, func(tb testing.TB) {
		defer func() { here <- netnsInode(t) }()
		ns.Run(func() { tb.Fatal("stop") })
	})
	if !a.failed {
		t.Error("Fatal inside of Run did not end the test")
	}
	if <-here != netnsInode(t) {
		t.Error("Fatal inside of Run left the goroutine in the namespace")
	}
}

func TestNetNSParallel(t *testing.T) {
	Need(t, capset.SysAdmin, capset.NetAdmin)
	for range 4 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			// The same port everywhere: only one namespace each allows that.
			NetNS(t)
			c, err := net.ListenPacket("udp", "127.0.0.1:4433")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			other := OtherNetNS(t)
			other.Run(func() {
				c, err := net.ListenPacket("udp", "127.0.0.1:4433")
				if err != nil {
					t.Error(err)
					return
				}
				c.Close()
			})
		})
	}
}

func TestCommand(t *testing.T) {
	ns := OtherNetNS(t)
	var want string
	ns.Run(func() { want = fmt.Sprintf("net:[%d]", netnsInode(t)) })
	out, err := ns.Command("readlink", "/proc/self/ns/net").Output()
	if got := strings.TrimSpace(string(out)); err != nil || got != want {
		t.Errorf("Output: %q, %v; want %q", got, err, want)
	}
	out, err = ns.Command("sh", "-c", "readlink /proc/self/ns/net >&2").CombinedOutput()
	if got := strings.TrimSpace(string(out)); err != nil || got != want {
		t.Errorf("CombinedOutput: %q, %v; want %q", got, err, want)
	}
	cmd := ns.Command("sh", "-c", "test $(readlink /proc/self/ns/net) = '"+want+"'")
	if err := cmd.Run(); err != nil {
		t.Errorf("Run: %v", err)
	}
	cmd = ns.Command("sh", "-c", "test $(readlink /proc/self/ns/net) = '"+want+"'")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("Start: %v", err)
	}
}

func TestVeth(t *testing.T) {
	a, b := NetNS(t), OtherNetNS(t)
	ia, ib := Veth(t,
		End{a, "left", []string{"192.0.2.1/24", "2001:db8::1/64"}},
		End{b, "right", []string{"192.0.2.2/24", "2001:db8::2/64"}})
	name := func(ns *Netns, index int) (name string) {
		ns.Run(func() {
			link, err := netlink.LinkByIndex(index)
			if err != nil {
				t.Fatal(err)
			}
			name = link.Attrs().Name
		})
		return name
	}
	if l, r := name(a, ia), name(b, ib); l != "left" || r != "right" {
		t.Errorf("indices name %q and %q", l, r)
	}
	for _, host := range []string{"192.0.2.2", "2001:db8::2"} {
		exchange(t, a, b, host)
	}
	for _, host := range []string{"192.0.2.1", "2001:db8::1"} {
		exchange(t, b, a, host)
	}
}

// exchange sends a datagram from one namespace to a host in another one, and
// one back.
func exchange(t *testing.T, from, to *Netns, host string) {
	t.Helper()
	var server net.PacketConn
	to.Run(func() {
		var err error
		if server, err = net.ListenPacket("udp", net.JoinHostPort(host, "53")); err != nil {
			t.Fatal(err)
		}
	})
	defer server.Close()
	var client net.Conn
	from.Run(func() {
		var err error
		if client, err = net.Dial("udp", server.LocalAddr().String()); err != nil {
			t.Fatal(err)
		}
	})
	defer client.Close()
	deadline := time.Now().Add(10 * time.Second)
	if err := errors.Join(server.SetDeadline(deadline), client.SetDeadline(deadline)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	n, peer, err := server.ReadFrom(buf)
	if err != nil || string(buf[:n]) != "question" || peer.String() != client.LocalAddr().String() {
		t.Fatalf("%s received %q from %v, %v", host, buf[:n], peer, err)
	}
	if _, err := server.WriteTo([]byte("answer"), peer); err != nil {
		t.Fatal(err)
	}
	n, err = client.Read(buf)
	if err != nil || string(buf[:n]) != "answer" {
		t.Fatalf("%s answered %q, %v", host, buf[:n], err)
	}
}

func TestAddDevice(t *testing.T) {
	ns := NetNS(t)
	one := ns.AddDevice("one", "192.0.2.1/24", "2001:db8::1/64")
	two := ns.AddDevice("two", "198.51.100.1/24")
	if one == two {
		t.Errorf("two devices have index %d", one)
	}
	for address, device := range map[string]string{"192.0.2.1": "one", "2001:db8::1": "one", "198.51.100.1": "two"} {
		lc := net.ListenConfig{Control: bindToDevice(device)}
		c, err := lc.ListenPacket(t.Context(), "udp", net.JoinHostPort(address, "53"))
		if err != nil {
			t.Errorf("listen on %s, %s: %v", address, device, err)
			continue
		}
		c.Close()
	}
}

func TestBPFFS(t *testing.T) {
	Need(t, capset.SysAdmin)
	var dir string
	t.Run("in", func(t *testing.T) {
		dir = BPFFS(t)
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil || st.Type != unix.BPF_FS_MAGIC {
			t.Fatalf("file system of %s: %#x, %v", dir, st.Type, err)
		}
		if err := os.Mkdir(filepath.Join(dir, "group"), 0o700); err != nil {
			t.Error(err)
		}
		other := BPFFS(t)
		if other == dir {
			t.Error("two calls gave one folder")
		}
		// The kernel may put iterators of its own there (maps.debug, progs.debug).
		if _, err := os.Stat(filepath.Join(other, "group")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("two calls gave one file system: %v", err)
		}
	})
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s outlived its test: %v", dir, err)
	}
}

func TestUnmountBusy(t *testing.T) {
	Need(t, capset.SysAdmin)
	dir := t.TempDir()
	if err := unix.Mount("bpffs", dir, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := unmount(dir, 0); !errors.Is(err, unix.EBUSY) {
		t.Errorf("unmount in use: %v, want EBUSY", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Type == unix.BPF_FS_MAGIC {
		t.Errorf("still mounted (%v)", err)
	}
}

func TestNeed(t *testing.T) {
	have, err := capset.Effective()
	if err != nil {
		t.Fatal(err)
	}
	impossible := capset.Last + 1
	t.Setenv(NoSkipEnv, "")
	if a := try(t, func(t testing.TB) { Need(t, impossible) }); !a.skipped || a.message != "needs capability 41: run as root" {
		t.Errorf("Need: %+v", a)
	}
	if a := try(t, func(t testing.TB) { Need(t) }); a.skipped || a.failed {
		t.Errorf("Need of nothing: %+v", a)
	}
	if have.Has(capset.NetAdmin) {
		if a := try(t, func(t testing.TB) { Need(t, capset.NetAdmin) }); a.skipped || a.failed {
			t.Errorf("Need of what is there: %+v", a)
		}
	}
	if a := try(t, func(t testing.TB) { NeedCommand(t, "no-such-command", "no-package") }); !a.skipped ||
		a.message != "needs the command no-such-command: install the package no-package" {
		t.Errorf("NeedCommand: %+v", a)
	}
	if got := NeedCommand(t, "sh", "dash"); !filepath.IsAbs(got) {
		t.Errorf("NeedCommand = %q", got)
	}

	t.Setenv(NoSkipEnv, "1")
	if a := try(t, func(t testing.TB) { Need(t, impossible) }); !a.failed || !strings.Contains(a.message, "capability 41") {
		t.Errorf("Need that may not skip: %+v", a)
	}
	if a := try(t, func(t testing.TB) { NeedCommand(t, "no-such-command", "no-package") }); !a.failed {
		t.Errorf("NeedCommand that may not skip: %+v", a)
	}
}

var needRoot = NewProgram("need root", func(c *Conversation) error {
	a := &attempt{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		NeedRoot(a)
	}()
	<-done
	c.Send("skipped=%t failed=%t %s", a.skipped, a.failed, a.message)
	return nil
})

func TestNeedRoot(t *testing.T) {
	NeedRoot(t)
	if got := needRoot.Start(t, Options{As: Nobody(), Env: []string{NoSkipEnv + "=0"}}).Recv(); got != "skipped=true failed=false needs user 0: run as root" {
		t.Errorf("as nobody: %s", got)
	}
	if got := needRoot.Start(t, Options{As: &Identity{Caps: []capset.Cap{capset.NetAdmin}}, Env: []string{NoSkipEnv + "=1"}}).Recv(); !strings.Contains(got, "failed=true") ||
		!strings.Contains(got, "CAP_SYS_ADMIN") || strings.Contains(got, "CAP_NET_ADMIN") {
		t.Errorf("as root with few capabilities: %s", got)
	}
	needRoot.Start(t, Options{}).Expect("skipped=false failed=false ")
}

func TestSkipIfNotSupported(t *testing.T) {
	now, err := kernel.Current()
	if err != nil {
		t.Fatal(err)
	}
	newer := kernel.Version{Major: now.Major + 1}
	for _, tc := range []struct {
		name            string
		err             error
		since           kernel.Version
		skipped, failed bool
	}{
		{"none", nil, newer, false, false},
		{"another error", errors.New("broken"), newer, false, false},
		{"old kernel", fmt.Errorf("attach: %w", ebpf.ErrNotSupported), newer, true, false},
		{"old kernel, by the standard library's error", fmt.Errorf("attach: %w", errors.ErrUnsupported), newer, true, false},
		{"kernel that has it", fmt.Errorf("attach: %w", ebpf.ErrNotSupported), now, false, true},
	} {
		a := try(t, func(t testing.TB) { SkipIfNotSupported(t, tc.err, tc.since) })
		if a.skipped != tc.skipped || a.failed != tc.failed {
			t.Errorf("%s: %+v", tc.name, a)
		}
	}
}

func TestWaitFor(t *testing.T) {
	var calls atomic.Int32
	WaitFor(t, time.Minute, func() bool { return calls.Add(1) == 3 }, "three calls")
	if got := calls.Load(); got != 3 {
		t.Errorf("%d calls", got)
	}
	a := try(t, func(t testing.TB) {
		WaitFor(t, time.Millisecond, func() bool { return false }, "the %s", "impossible")
	})
	if !a.failed || a.message != "waited 1ms in vain: the impossible" {
		t.Errorf("%+v", a)
	}
}

// TestMainReports runs this benchmark in a process of its own. It is none of
// the tests, as it can only fail there.
const leakEnv = "INSTAR_TEST_LEAK"

var leakedFile *os.File

func BenchmarkLeakOnPurpose(b *testing.B) {
	switch os.Getenv(leakEnv) {
	case "goroutine":
		go func() { select {} }()
	case "descriptor":
		c, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		if leakedFile, err = c.(*net.UDPConn).File(); err != nil {
			b.Fatal(err)
		}
		c.Close()
	case "none":
		fmt.Println("leaks nothing")
	default:
		b.Skip("is for TestMainReports")
	}
}

func TestMainReports(t *testing.T) {
	for _, tc := range []struct {
		leak string
		code int
		want []string
	}{
		{"none", 0, []string{"leaks nothing", "PASS"}},
		{"goroutine", 1, []string{"left over after the tests", "BenchmarkLeakOnPurpose"}},
		{"descriptor", 1, []string{"left over after the tests", "1 leaked descriptors", "socket:[", "127.0.0.1:"}},
	} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^$", "-test.bench=LeakOnPurpose", "-test.benchtime=1x")
		cmd.Env = append(os.Environ(), leakEnv+"="+tc.leak)
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != tc.code {
			t.Errorf("%s: exit code %d, want %d", tc.leak, code, tc.code)
		}
		for _, want := range tc.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s: no %q in\n%s", tc.leak, want, out)
			}
		}
	}
}

func TestDescriptors(t *testing.T) {
	before, err := descriptors()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := leaked(before, 0); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("leaked = %v, want %s", err, path)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := leaked(before, 10*time.Second); err != nil {
		t.Error(err)
	}
	if !slices.ContainsFunc(before, func(d descriptor) bool { return d.fd == 2 }) {
		t.Errorf("the standard error is not among %v", before)
	}
}
