// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/capset"
)

func bindToDevice(device string) func(string, string, syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) (err error) {
		err2 := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), device) })
		return errors.Join(err, err2)
	}
}

// echo answers commands until the test closes the conversation.
var echo = NewProgram("echo", func(c *Conversation) error {
	for {
		line, ok := c.Recv()
		if !ok {
			return nil
		}
		switch line {
		case "args":
			c.Send("%q", c.Args)
		case "env":
			c.Send("%s%s", os.Getenv("TESTUTIL_EXTRA"), os.Getenv(childEnv))
		case "pid":
			c.Send("%d", os.Getpid())
		case "identity":
			caps, err := capset.Effective()
			if err != nil {
				return err
			}
			groups, err := os.Getgroups()
			if err != nil {
				return err
			}
			c.Send("uid %d gid %d groups %v caps %#x", os.Getuid(), os.Getgid(), groups, uint64(caps))
		case "netns":
			link, err := os.Readlink("/proc/self/ns/net")
			if err != nil {
				return err
			}
			c.Send("%s", link)
		case "read file":
			if _, err := c.Files[0].Seek(0, io.SeekStart); err != nil {
				return err
			}
			b, err := io.ReadAll(c.Files[0])
			if err != nil {
				return err
			}
			flags, err := unix.FcntlInt(c.Files[0].Fd(), unix.F_GETFD, 0)
			if err != nil {
				return err
			}
			c.Send("%s, close-on-exec %t", b, flags&unix.FD_CLOEXEC != 0)
		case "execute": // what it executes inherits nothing
			out, err := exec.Command("ls", "/proc/self/fd").Output()
			if err != nil {
				return err
			}
			c.Send("%s", strings.Fields(string(out)))
		case "leave a child":
			cmd := exec.Command("sleep", "1000")
			if err := cmd.Start(); err != nil {
				return err
			}
			c.Send("%d", cmd.Process.Pid)
		case "all at once":
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for range 50 {
						c.Send("%s", strings.Repeat("x", 500))
					}
				})
			}
			wg.Wait()
		case "print":
			fmt.Println("to standard output")
			fmt.Fprint(os.Stderr, "to standard error, no newline")
			c.Send("printed")
		case "fail":
			return errors.New("as asked")
		case "exit 42":
			os.Exit(42)
		case "panic":
			panic("as asked")
		case "hang":
			select {}
		default:
			c.Send("%s", line)
		}
	}
})

func TestConversation(t *testing.T) {
	p := echo.Start(t, Options{Args: []string{"one", "two words", ""}, Env: []string{"TESTUTIL_EXTRA=yes"}})
	p.Send("hello %d", 1)
	p.Expect("hello 1")
	for ask, want := range map[string]string{
		"args":       `["one" "two words" ""]`,
		"env":        "yes", // and the child does not start children of the test's
		"pid":        strconv.Itoa(p.PID),
		"two\nlines": "two lines",
		"":           "",
	} {
		if got := p.Ask("%s", ask); got != want {
			t.Errorf("%q: %q, want %q", ask, got, want)
		}
	}
	p.Send("all at once")
	for range 400 {
		p.Expect(strings.Repeat("x", 500))
	}
	p.CloseSend()
	if code := p.Wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestExitCodes(t *testing.T) {
	for ask, want := range map[string]int{"fail": 1, "exit 42": 42, "panic": 2} {
		p := echo.Start(t, Options{})
		p.Send("%s", ask)
		if got := p.Wait(); got != want {
			t.Errorf("%s: exit code %d, want %d", ask, got, want)
		}
	}
}

func TestKill(t *testing.T) {
	p := echo.Start(t, Options{})
	if got := p.Ask("ready"); got != "ready" {
		t.Fatal(got)
	}
	select {
	case <-p.Done():
		t.Fatal("ended by itself")
	default:
	}
	p.Kill()
	<-p.Done()
	if got := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !got.Signaled() || got.Signal() != unix.SIGKILL {
		t.Errorf("ended by %v", got)
	}
	if got := p.Wait(); got != -1 {
		t.Errorf("exit code %d, want -1", got)
	}
	if err := unix.Kill(p.PID, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the process is still there: %v", err)
	}
}

// Whatever a test leaves running ends with it.
func TestCleanup(t *testing.T) {
	var pids []int
	t.Run("in", func(t *testing.T) {
		p := echo.Start(t, Options{})
		grandchild, err := strconv.Atoi(p.Ask("leave a child"))
		if err != nil {
			t.Fatal(err)
		}
		pids = []int{p.PID, grandchild}
		p.Send("hang")

		q := echo.Start(t, Options{})
		if grandchild, err = strconv.Atoi(q.Ask("leave a child")); err != nil {
			t.Fatal(err)
		}
		q.Kill()
		pids = append(pids, grandchild)
	})
	for _, pid := range pids {
		WaitFor(t, 10*time.Second, func() bool { return !running(pid) }, "the end of process %d", pid)
	}
}

// running is false for a zombie, too: nobody may wait for orphans here.
func running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z")
}

func TestFailures(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(p *Process)
		want string
	}{
		{"the wrong line", func(p *Process) { p.Send("a"); p.Expect("b") }, `says "a", want "b"`},
		{"no line", func(p *Process) { p.Send("hang"); p.Recv() }, "sent nothing for 50ms"},
		{"an end", func(p *Process) { p.Send("exit 42"); p.Recv() }, "ended the conversation"},
		{"no end", func(p *Process) { p.Send("hang"); p.Wait() }, "did not end within 50ms"},
		{"killed twice", func(p *Process) { p.Kill(); p.Kill() }, "process already finished"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := echo.Start(t, Options{})
			p.Ask("ready")
			a := try(t, func(t testing.TB) {
				q := *p
				q.t = t
				if tc.want != "ended the conversation" && tc.name != "killed twice" {
					q.timeout = 50 * time.Millisecond
				}
				tc.do(&q)
			})
			if !a.failed || !strings.Contains(a.message, tc.want) {
				t.Errorf("failed=%t %q, want %q", a.failed, a.message, tc.want)
			}
		})
	}
	a := try(t, func(t testing.TB) {
		hooked = false
		defer func() { hooked = true }()
		echo.Start(t, Options{})
	})
	if !a.failed {
		t.Error("a program starts without Main")
	}
	defer func() {
		if recover() == nil {
			t.Error("a name can be given twice")
		}
	}()
	NewProgram("echo", nil)
}

// recorder keeps the log of a test.
type recorder struct {
	testing.TB
	mu  sync.Mutex
	log []string
}

func (r *recorder) Logf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = append(r.log, fmt.Sprintf(format, args...))
}

func TestOutputGoesToTheLog(t *testing.T) {
	var r recorder
	var prefix string
	t.Run("in", func(t *testing.T) {
		r.TB = t
		p := echo.Start(&r, Options{})
		prefix = p.String() + ": "
		p.Send("print")
		p.Expect("printed")
		p.CloseSend()
		p.Wait()
	})
	want := []string{prefix + "to standard output", prefix + "to standard error, no newline"}
	if got := r.log; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("log %q, want %q", got, want)
	}
}

func TestFiles(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("content"); err != nil {
		t.Fatal(err)
	}
	p := echo.Start(t, Options{Files: []*os.File{f}})
	if got, want := p.Ask("read file"), "content, close-on-exec true"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	// What the test was started with is not the program's business.
	want, err := exec.Command("ls", "/proc/self/fd").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := p.Ask("execute"), fmt.Sprint(strings.Fields(string(want))); got != want {
		t.Errorf("a command that the program executes has the descriptors %s, want %s", got, want)
	}
}

func TestIdentity(t *testing.T) {
	NeedRoot(t)
	ns := OtherNetNS(t)
	var inside string
	ns.Run(func() { inside = fmt.Sprintf("net:[%d]", netnsInode(t)) })
	outside := fmt.Sprintf("net:[%d]", netnsInode(t))
	for _, tc := range []struct {
		name  string
		o     Options
		want  string
		netns string
	}{
		{"nobody", Options{As: Nobody()}, "uid 65534 gid 65534 groups [] caps 0x0", outside},
		{"another user", Options{As: &Identity{UID: 12345, GID: 23456}, NS: ns}, "uid 12345 gid 23456 groups [] caps 0x0", inside},
		{"a user with a capability", Options{As: &Identity{UID: 12345, GID: 23456, Caps: []capset.Cap{capset.BPF}}},
			fmt.Sprintf("uid 12345 gid 23456 groups [] caps %#x", uint64(1<<capset.BPF)), outside},
		{"root without capabilities", Options{As: &Identity{GID: 7}}, "uid 0 gid 7 groups [] caps 0x0", outside},
		{"root with two", Options{As: &Identity{GID: 7, Caps: []capset.Cap{capset.BPF, capset.NetAdmin}}, NS: ns},
			fmt.Sprintf("uid 0 gid 7 groups [] caps %#x", uint64(1<<capset.BPF|1<<capset.NetAdmin)), inside},
	} {
		p := echo.Start(t, tc.o)
		if got := p.Ask("identity"); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
		if got := p.Ask("netns"); got != tc.netns {
			t.Errorf("%s: in %s, want %s", tc.name, got, tc.netns)
		}
	}
	// The thread that dropped capabilities did not stay.
	caps, err := capset.Effective()
	if err != nil {
		t.Fatal(err)
	}
	p := echo.Start(t, Options{})
	if got, want := p.Ask("identity"), fmt.Sprintf("caps %#x", uint64(caps)); !strings.HasSuffix(got, want) {
		t.Errorf("after it: %s, want %s", got, want)
	}
}

func TestNetNSOfChild(t *testing.T) {
	ns := NetNS(t)
	inside := fmt.Sprintf("net:[%d]", netnsInode(t))
	if got := echo.Start(t, Options{}).Ask("netns"); got != inside {
		t.Errorf("by default in %s, want the test's %s", got, inside)
	}
	other := OtherNetNS(t)
	if got := echo.Start(t, Options{NS: other}).Ask("netns"); got == inside {
		t.Error("NS has no effect")
	}
	if got := echo.Start(t, Options{NS: ns}).Ask("netns"); got != inside {
		t.Errorf("in %s, want %s", got, inside)
	}
}

// starter is a test that dies before it can clean up.
var starter = NewProgram("starter", func(c *Conversation) error {
	hooked = true
	// The child's end of the conversation is this process's only link to it.
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=echo", childFilesEnv+"=0")
	cmd.ExtraFiles = []*os.File{r, outW}
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := w.WriteString("ready\n"); err != nil {
		return err
	}
	if _, err := outR.Read(make([]byte, 16)); err != nil {
		return err
	}
	c.Send("%d", cmd.Process.Pid)
	c.Recv()
	return nil
})

func TestOrphanEnds(t *testing.T) {
	p := starter.Start(t, Options{})
	orphan, err := strconv.Atoi(p.Recv())
	if err != nil {
		t.Fatal(err)
	}
	p.Kill()
	WaitFor(t, 10*time.Second, func() bool { return !running(orphan) }, "the end of process %d, whose test was killed", orphan)
}
