// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/handover"
	"instar/internal/capset"
	"instar/internal/kernel"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// machineEnv is the variable of the environment that, set to 1, says that the tests have
// the machine for themselves, and may change its settings.
const machineEnv = "INSTAR_TEST_MACHINE"

// patience is how long is waited for what should take microseconds.
const patience = 20 * time.Second

// check finds out whether a feature works. How it does not is checked, too: that has to
// be what Feature.Older says. An error is neither.
type check func(t *testing.T) (works bool, err error)

// checks are by name of the feature.
var checks = map[string]check{
	"steering":     steering,
	"handover":     handingOver,
	"memlock":      memlock,
	"cookie":       cookie,
	"migrate":      migrate,
	"unprivileged": unprivileged,
	"last-word":    lastWord,
	"incoming-cpu": incomingCPU,
}

func TestFeatures(t *testing.T) {
	running, err := kernel.Current()
	if err != nil {
		t.Fatal(err)
	}
	if len(checks) != len(Features) {
		t.Errorf("%d checks for %d features", len(checks), len(Features))
	}
	if !slices.IsSortedFunc(Features, func(a, b Feature) int { return a.Since.Compare(b.Since) }) {
		t.Error("the features are not sorted by version")
	}
	for _, f := range Features {
		t.Run(f.Name, func(t *testing.T) {
			if !f.border() {
				t.Errorf("since %v: no series of the table is on each side", f.Since)
			}
			if checks[f.Name] == nil {
				t.Fatal("no check")
			}
			works, err := checks[f.Name](t)
			if err != nil {
				t.Fatal(err)
			}
			if want := running.AtLeast(f.Since); works != want {
				t.Errorf("Linux %v: it works: %t; the table says since %v", running, works, f.Since)
			}
		})
	}
}

func options(t *testing.T, root string) dispatch.Options {
	t.Helper()
	return dispatch.Options{Address: "127.0.0.1:4433", Service: "test", Root: root, Steering: dispatch.SteeringStateless}
}

// serve is what a server does of its life until it serves.
func serve(g *dispatch.Group) (err error) {
	n, err := g.Join(1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	return n.Activate()
}

func steering(t *testing.T) (bool, error) {
	root := testutil.BPFFS(t)
	testutil.NetNS(t)
	g, err := dispatch.Open(options(t, root))
	if errors.Is(err, dispatch.ErrNotSupported) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer g.Close()
	n, err := g.Join(2)
	if err != nil {
		return false, err
	}
	defer n.Close()
	if err := n.Activate(); err != nil {
		return false, err
	}
	client, err := net.Dial("udp", "127.0.0.1:4433")
	if err != nil {
		return false, err
	}
	defer client.Close()
	if _, err := client.Write([]byte("question")); err != nil {
		return false, err
	}
	var s dispatch.Snapshot
	testutil.WaitFor(t, patience, func() bool {
		s, err = g.Snapshot()
		return err != nil || s.Packets > 0
	}, "a packet")
	if err != nil || s.Verdicts["new"] != 1 {
		return false, fmt.Errorf("verdicts %v, %w", s.Verdicts, err)
	}
	return true, nil
}

func handingOver(t *testing.T) (bool, error) {
	testutil.NetNS(t)
	o := handover.Options{Name: "test", Socket: filepath.Join(t.TempDir(), "control"), Command: []string{"/proc/self/exe"}, Probation: 50 * time.Millisecond}
	begin := func() (*handover.Handover, error) {
		h, err := handover.New(o)
		if err != nil {
			return nil, err
		}
		if _, err := h.Listen("tcp", "tcp", "127.0.0.1:4433"); err != nil {
			return nil, errors.Join(err, h.Close())
		}
		return h, h.Ready(t.Context())
	}
	first, err := begin()
	if err != nil {
		return false, err
	}
	second, err := begin()
	if err != nil {
		return false, errors.Join(err, first.Close())
	}
	select {
	case <-first.Superseded():
	case <-time.After(patience):
		err = errors.New("the first one was not superseded")
	}
	return err == nil, errors.Join(err, first.Close(), second.Close())
}

// inGroup opens a group, as what the process is, and reports the error.
var inGroup = testutil.NewProgram("in-group", func(c *testutil.Conversation) error {
	if c.Args[1] == "locked" {
		none := &unix.Rlimit{}
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, none); err != nil {
			return err
		}
	}
	g, err := dispatch.Open(dispatch.Options{Address: "127.0.0.1:4433", Service: "test", Root: c.Args[0], Steering: dispatch.SteeringStateless})
	if err == nil {
		err = errors.Join(serve(g), g.Close())
	}
	switch {
	case err == nil:
		c.Send("works")
	case errors.Is(err, dispatch.ErrPermission):
		c.Send("permission: %v", err)
	default:
		c.Send("%v", err)
	}
	return nil
})

func memlock(t *testing.T) (bool, error) {
	testutil.NeedRoot(t)
	root := testutil.BPFFS(t)
	ns := testutil.NetNS(t)
	p := inGroup.Start(t, testutil.Options{
		Args: []string{root, "locked"}, NS: ns,
		As: &testutil.Identity{Caps: []capset.Cap{capset.BPF, capset.NetAdmin, capset.Perfmon}},
	})
	switch answer := p.Recv(); {
	case answer == "works":
		return true, nil
	case strings.HasPrefix(answer, "permission: ") && strings.Contains(answer, "raise RLIMIT_MEMLOCK (a unit's"):
		return false, nil
	default:
		return false, errors.New(answer)
	}
}

func cookie(t *testing.T) (bool, error) {
	root := testutil.BPFFS(t)
	testutil.NetNS(t)
	g, err := dispatch.Open(options(t, root))
	if err != nil {
		return false, err
	}
	defer g.Close()
	namespace := filepath.Base(filepath.Dir(g.Path()))
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), &st); err != nil {
		return false, err
	}
	byInode := namespace == fmt.Sprintf("inode-%d", st.Ino)
	if !byInode && strings.Trim(namespace, "0123456789") != "" {
		return false, fmt.Errorf("the folder is %s", namespace)
	}
	return !byInode, nil
}

// migrate makes a connection that waits at a listener which closes.
func migrate(t *testing.T) (bool, error) {
	root := testutil.BPFFS(t)
	testutil.NetNS(t)
	o := options(t, root)
	o.Steering = dispatch.SteeringTCP
	g, err := dispatch.Open(o)
	if errors.Is(err, dispatch.ErrNotSupported) {
		if !strings.Contains(err.Error(), "5.14") || !strings.Contains(err.Error(), "handover") {
			return false, err
		}
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer g.Close()
	old, err := g.Join(1)
	if err != nil {
		return false, err
	}
	if err := old.Activate(); err != nil {
		return false, errors.Join(err, old.Close())
	}
	client, err := net.Dial("tcp", o.Address)
	if err != nil {
		return false, errors.Join(err, old.Close())
	}
	defer client.Close()
	successor, err := g.Join(1)
	if err != nil {
		return false, errors.Join(err, old.Close())
	}
	defer successor.Close()
	if err := errors.Join(successor.Activate(), old.Close()); err != nil {
		return false, err
	}
	l := successor.Listeners()[0]
	if err := l.SetDeadline(time.Now().Add(patience)); err != nil {
		return false, err
	}
	c, err := l.Accept()
	if err != nil {
		return false, fmt.Errorf("the connection did not move: %w", err)
	}
	return true, c.Close()
}

func unprivileged(t *testing.T) (bool, error) {
	testutil.NeedRoot(t)
	const sysctl = "/proc/sys/kernel/unprivileged_bpf_disabled"
	text, err := os.ReadFile(sysctl)
	if err != nil {
		return false, err
	}
	setting := strings.TrimSpace(string(text))
	root := testutil.BPFFS(t)
	ns := testutil.NetNS(t)
	who := testutil.Nobody()
	if _, err := dispatch.Prepare(options(t, root), dispatch.Owner{UID: who.UID, GID: who.GID}); err != nil {
		return false, err
	}
	ask := func() string {
		return inGroup.Start(t, testutil.Options{Args: []string{root, ""}, NS: ns, As: who}).Recv()
	}
	answer := ask()
	if setting == "0" {
		if answer != "works" {
			return false, fmt.Errorf("%s is 0: %s", sysctl, answer)
		}
		// The machine's setting is not this test's to change.
		testutil.Skip(t, "needs a machine where %s is not 0", sysctl)
	}
	if os.Getenv(machineEnv) == "1" { // this one is
		if err := os.WriteFile(sysctl, []byte("0"), 0o644); err != nil {
			return false, err
		}
		if without := ask(); without != "works" {
			t.Errorf("with %s at 0: %s", sysctl, without)
		}
		if err := os.WriteFile(sysctl, text, 0o644); err != nil {
			return false, err
		}
	}
	switch {
	case answer == "works":
		return true, nil
	case strings.HasPrefix(answer, "permission: ") && strings.Contains(answer, "unprivileged_bpf_disabled"):
		return false, nil
	default:
		return false, fmt.Errorf("%s is %s: %s", sysctl, setting, answer)
	}
}

// lastWord lets a peer write and close its end while somebody sends to it, who has found
// it and waits for a page of memory.
func lastWord(t *testing.T) (works bool, err error) {
	page := newSlowPage(t) // may skip the test
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, unix.Close(fds[0])) }()
	sent := make(chan error, 1)
	go func() { sent <- unix.Sendto(fds[0], page.memory, unix.MSG_NOSIGNAL, nil) }()
	if err := page.awaited(); err != nil {
		return false, errors.Join(err, unix.Close(fds[1]))
	}
	const words = 50
	for range words {
		if _, err := unix.Write(fds[1], make([]byte, 1000)); err != nil {
			return false, errors.Join(err, unix.Close(fds[1]))
		}
	}
	if err := errors.Join(unix.Close(fds[1]), page.come()); err != nil {
		return false, err
	}
	if err := <-sent; err == nil {
		return false, errors.New("something was sent to a closed socket")
	}
	read := 0
	for b := make([]byte, 2000); ; {
		n, err := unix.Read(fds[0], b)
		if errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EINTR) {
			continue // it is told once, before what is queued
		}
		if err != nil || n == 0 {
			break
		}
		read++
	}
	if read != 0 && read != words {
		return false, fmt.Errorf("%d of %d words are there", read, words)
	}
	return read == words, nil
}

// slowPage is a page of memory that comes when the test lets it (ioctl_userfaultfd(2)).
type slowPage struct {
	memory []byte
	fd     int
}

// uffdRange begins the arguments of the ioctls that follow, from
// include/uapi/linux/userfaultfd.h.
type uffdRange struct {
	start, length, mode, answer uint64
}

type uffdAPI struct{ api, features, ioctls uint64 }

const (
	uffdioAPI      = 0xc018aa3f
	uffdioRegister = 0xc020aa00
	uffdioZeropage = 0xc020aa04
	uffdVersion    = 0xaa
	uffdMissing    = 1 // UFFDIO_REGISTER_MODE_MISSING
)

func newSlowPage(t *testing.T) *slowPage {
	t.Helper()
	testutil.NeedRoot(t)
	memory, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(memory) })
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		t.Fatalf("userfaultfd: %v", errno)
	}
	// Closing it lets whoever waits for the page have it.
	t.Cleanup(func() { _ = unix.Close(int(fd)) })
	p := &slowPage{memory, int(fd)}
	api := uffdAPI{api: uffdVersion}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uffdioAPI, uintptr(unsafe.Pointer(&api))); errno != 0 {
		t.Fatalf("ioctl UFFDIO_API: %v", errno)
	}
	if err := p.ioctl(uffdioRegister, uffdMissing); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *slowPage) ioctl(request uintptr, mode uint64) error {
	r := uffdRange{start: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p.memory)))), length: uint64(len(p.memory)), mode: mode}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(p.fd), request, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return fmt.Errorf("ioctl %#x of userfaultfd: %w", request, errno)
	}
	return nil
}

// awaited waits until somebody needs the page.
func (p *slowPage) awaited() error {
	poll := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		n, err := unix.Poll(poll, 100)
		if n == 1 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return errors.New("nobody needs the page")
}

// come makes it there, filled with zeros.
func (p *slowPage) come() error { return p.ioctl(uffdioZeropage, 0) }

// incomingCPU sends many flows to a group of two sockets, one of which prefers the CPU
// that packets come on.
func incomingCPU(t *testing.T) (bool, error) {
	testutil.NetNS(t)
	// The kernel handles a packet of lo on the CPU that sends it.
	var old, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &old); err != nil {
		return false, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpu := 0
	for !old.IsSet(cpu) {
		cpu++
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return false, err
	}
	defer func() { _ = unix.SchedSetaffinity(0, &old) }()

	var fds [2]int
	address := &unix.SockaddrInet4{Port: 4433, Addr: [4]byte{127, 0, 0, 1}}
	for i := range fds {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return false, err
		}
		defer func() { _ = unix.Close(fd) }()
		if err := errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1), unix.Bind(fd, address)); err != nil {
			return false, err
		}
		fds[i] = fd
	}
	if err := unix.SetsockoptInt(fds[1], unix.SOL_SOCKET, unix.SO_INCOMING_CPU, cpu); err != nil {
		return false, err
	}
	const flows = 60
	for range flows {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return false, err
		}
		if err := errors.Join(unix.Sendto(fd, []byte("x"), 0, address), unix.Close(fd)); err != nil {
			return false, err
		}
	}
	var got [2]int
	testutil.WaitFor(t, patience, func() bool {
		for i, fd := range fds {
			for {
				if _, _, err := unix.Recvfrom(fd, make([]byte, 8), 0); err != nil {
					break
				}
				got[i]++
			}
		}
		return got[0]+got[1] == flows
	}, "%d packets", flows)
	if got[1] < flows && got[0] < flows/10 {
		return false, fmt.Errorf("the sockets got %v packets: neither the hash nor the CPU decides", got)
	}
	return got[1] == flows, nil
}
