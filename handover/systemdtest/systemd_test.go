// SPDX-License-Identifier: Apache-2.0

package systemdtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
	"instar/internal/testutil"
)

const patience = 30 * time.Second

// boot is run in new namespaces, makes a root file system and becomes systemd. What is
// at $3, the machine's own or another one, is there for reading only, and everything
// that could be written is memory. None of its units is there: the machine's would tidy
// up the machine.
const boot = `set -e
mount --make-rprivate /
new=$1/root
mount --bind "$3" "$new"
mount -o remount,bind,ro "$new"
mount -t proc proc "$new/proc"
mount -t sysfs -o ro sysfs "$new/sys"
mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
mount --rbind /dev "$new/dev"
mount --bind "$2" "$new/dev/console"
for memory in run tmp var usr/lib/systemd/system usr/lib/systemd/system-generators; do
	mount -t tmpfs tmpfs "$new/$memory"
done
mkdir -p "$new/run/lock" "$new/run/old" "$new/var/tmp" "$new/var/lib" "$new/var/log"
mount --bind "$1/units" "$new/etc/systemd/system"
mount --bind "$1/bin" "$new/usr/local/bin"
cd "$new"
pivot_root . run/old
umount -l /run/old
export container=test SYSTEMD_COLORS=0
# Newer ones tell of notifications that they do not take at this level alone.
exec /lib/systemd/systemd --system --unit=test.target --log-target=console --log-level=debug --show-status=no \
	--default-standard-output=tty --default-standard-error=tty
`

// targets are all that systemd and the units ask for.
var targets = []string{"test", "sysinit", "basic", "sockets", "multi-user", "network", "shutdown", "umount", "final"}

// machine is a running systemd.
type machine struct {
	t   testing.TB
	ns  *testutil.Netns
	dir string
	pid int // of PID 1, outside
	log string

	tolerant bool // complaints of systemd are no errors
}

// start boots systemd with the units of examples/systemd, as edit changes them;
// those that it adds to the map are installed, too.
func start(t testing.TB, edit func(units map[string]string)) *machine {
	t.Helper()
	testutil.NeedRoot(t)
	testutil.NeedCommand(t, "nsenter", "util-linux")
	root := rootOf(t)
	m := &machine{t: t, ns: testutil.NetNS(t)}
	var err error
	if m.dir, err = os.MkdirTemp("", "systemdtest"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(m.dir) })
	if err := os.Chmod(m.dir, 0o755); err != nil { // #nosec G302: the service's user executes what is in it
		t.Fatal(err)
	}
	m.install(edit)

	cgroup := makeCgroup(t)
	m.log = filepath.Join(m.dir, "log")
	out, err := os.Create(m.log)
	if err != nil {
		t.Fatal(err)
	}
	console := newConsole(t, out)
	cmd := m.ns.Command("sh", "-c", `echo $$ >"$1/cgroup.procs"; exec unshare --pid --fork --kill-child --mount --mount-proc --uts --ipc --cgroup sh -c "$2" boot "$3" "$4" "$5"`,
		"boot", cgroup, boot, m.dir, console, root)
	cmd.Stdout, cmd.Stderr = out, out
	// Also when the test is killed. Its thread lives as long as it: NetNS has it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // PID 1 dies with unshare, and all others with it
		_ = cmd.Wait()
		testutil.WaitFor(t, patience, func() bool { return removeCgroups(cgroup) == nil }, "the end of the processes")
		text := m.said()
		if found := complaints(text); len(found) > 0 && !m.tolerant {
			t.Errorf("systemd complains: %q", found)
		}
		if t.Failed() {
			const most = 100_000
			t.Logf("end of the log of systemd:\n%s", text[max(0, len(text)-most):])
		}
		_ = out.Close()
	})
	testutil.WaitFor(t, patience, func() bool {
		m.pid = child(cmd.Process.Pid)
		if m.pid == 0 {
			return false
		}
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", m.pid))
		return strings.TrimSpace(string(name)) == "systemd"
	}, "systemd to start")
	said := ""
	t.Cleanup(func() {
		if t.Failed() && said != "" {
			t.Logf("the state of the system was %q", said)
		}
	})
	testutil.WaitFor(t, patience, func() bool {
		said, _ = m.run("systemctl", "is-system-running")
		return strings.TrimSpace(said) == "running"
	}, "systemd to run")
	return m
}

// complaint is what systemd says of notifications that it does not take.
var complaint = regexp.MustCompile(`(?m)^.*(reception only permitted|reception is disabled|[Nn]otif[a-z]* message.*ignoring|New main PID .* ignoring|Unknown key|Failed to parse).*$`)

// complaints finds them in a log. Which system calls there are is no business of a unit
// that uses systemd's own sets of them.
func complaints(log string) []string {
	return slices.DeleteFunc(complaint.FindAllString(log, -1), func(line string) bool {
		return strings.Contains(line, "Failed to parse system call, ignoring")
	})
}

// said is the log of systemd and of the service.
func (m *machine) said() string {
	m.t.Helper()
	text, err := os.ReadFile(m.log)
	if err != nil {
		m.t.Error(err)
	}
	return strings.ReplaceAll(string(text), "\r", "") // it comes by a terminal
}

// newConsole makes a terminal, which is all that PID 1 logs to, and returns its
// path. What is written there goes to the file.
func newConsole(t testing.TB, to io.Writer) string {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	var number int
	err = rawconn.Of(master, func(fd int) (err error) {
		if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		number, err = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		return err
	})
	if err != nil {
		t.Fatal(errors.Join(err, master.Close()))
	}
	path := fmt.Sprintf("/dev/pts/%d", number)
	// While it is open there is no hang-up.
	slave, err := os.OpenFile(path, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(errors.Join(err, master.Close()))
	}
	var reader sync.WaitGroup
	reader.Go(func() { _, _ = io.Copy(to, master) })
	t.Cleanup(func() {
		_ = slave.Close()
		_ = master.Close()
		reader.Wait()
	})
	return path
}

// makeCgroup makes one for PID 1. Of runs that were killed it removes what is left.
func makeCgroup(t testing.TB) string {
	t.Helper()
	root := cgroupRoot(t)
	old, err := filepath.Glob(filepath.Join(root, "systemdtest-*-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range old {
		pid := strings.Split(filepath.Base(path), "-")[1]
		if _, err := os.Stat("/proc/" + pid); errors.Is(err, os.ErrNotExist) {
			_ = removeCgroups(path) // whatever is not empty stays
		}
	}
	path, err := os.MkdirTemp(root, fmt.Sprintf("systemdtest-%d-", os.Getpid()))
	if err != nil {
		testutil.Skip(t, "no cgroup v2 hierarchy to write to: %v", err)
	}
	return path
}

// cgroupRoot is where cgroup v2 is mounted.
func cgroupRoot(t testing.TB) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return f[1]
		}
	}
	testutil.Skip(t, "no cgroup v2 is mounted")
	return ""
}

func removeCgroups(root string) error {
	var all []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			all = append(all, path)
		}
		return err
	})
	for i := len(all) - 1; i >= 0; i-- {
		if e := os.Remove(all[i]); e != nil {
			return e
		}
	}
	return err
}

// child is the pid of the only child of a process, 0 when there is none.
func child(pid int) int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}

// instar is the command, built once.
var instar = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "systemdtest")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "instar")
	if out, err := exec.Command("go", "build", "-o", path, "instar/cmd/instar").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build instar: %w\n%s", err, out)
	}
	return os.ReadFile(path)
})

// install copies the units, with another user, and the programs.
func (m *machine) install(edit func(units map[string]string)) {
	m.t.Helper()
	must := func(err error) {
		m.t.Helper()
		if err != nil {
			m.t.Fatal(err)
		}
	}
	bin := filepath.Join(m.dir, "bin")
	must(os.Mkdir(filepath.Join(m.dir, "units"), 0o755))
	must(os.Mkdir(bin, 0o755))
	must(os.Mkdir(filepath.Join(m.dir, "root"), 0o755))
	units := map[string]string{}
	for _, name := range targets {
		units[name+".target"] = "[Unit]\nDefaultDependencies=no\n"
	}
	for _, name := range []string{"app.service", "app.socket", "app-udp.socket"} {
		units[name] = example(m.t, name)
	}
	if edit != nil {
		edit(units)
	}
	for name, text := range units {
		m.write(name, text)
	}
	// A race detector would have each process sleep for a second at its end.
	m.write("app.service.d/race.conf", "[Service]\nEnvironment=GORACE=atexit_sleep_ms=0\n")
	self, err := os.ReadFile("/proc/self/exe")
	must(err)
	must(os.WriteFile(filepath.Join(bin, "app"), self, 0o755))
	command, err := instar()
	must(err)
	must(os.WriteFile(filepath.Join(bin, "instar"), command, 0o755))
}

// example is a unit of examples/systemd with a user that every machine has.
func example(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "examples", "systemd", name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.NewReplacer("\nUser=app", "\nUser=daemon", "\nGroup=app", "\nGroup=daemon").Replace(string(text))
}

// write makes a unit, or a drop-in of one.
func (m *machine) write(name, text string) {
	m.t.Helper()
	path := filepath.Join(m.dir, "units", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // #nosec G301: the manager's
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil { // #nosec G306: the manager's
		m.t.Fatal(err)
	}
}

// configure gives app.service a drop-in.
func (m *machine) configure(text string) {
	m.t.Helper()
	m.write("app.service.d/test.conf", text)
	m.must("systemctl", "daemon-reload")
}

// run runs a command inside.
func (m *machine) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(m.pid), "--all"}, args...)...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (m *machine) must(args ...string) string {
	m.t.Helper()
	out, err := m.run(args...)
	if err != nil {
		m.t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return out
}

// properties reads those of app.service.
func (m *machine) properties(names ...string) map[string]string {
	m.t.Helper()
	all := map[string]string{}
	for line := range strings.Lines(m.must("systemctl", "show", "-p", strings.Join(names, ","), "app.service")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		all[name] = value
	}
	return all
}

func (m *machine) property(name string) string {
	m.t.Helper()
	return m.properties(name)[name]
}

// await waits until app.service is in one of the states.
func (m *machine) await(states ...string) {
	m.t.Helper()
	testutil.WaitFor(m.t, patience, func() bool { return slices.Contains(states, m.property("ActiveState")) }, "the state %q", states)
}

// kill ends the main process; systemd knows when this returns.
func (m *machine) kill(main string) {
	m.t.Helper()
	m.must("kill", "-9", main)
	testutil.WaitFor(m.t, patience, func() bool { return m.property("MainPID") != main }, "the end of process %s", main)
}

// conversation is a connection that a process has accepted.
type conversation struct {
	net.Conn
	r   *bufio.Reader
	pid string // as it is inside
}

// hold connects, and waits until a process has accepted.
func (m *machine) hold(network, address string) (*conversation, error) {
	c := &conversation{}
	var err error
	m.ns.Run(func() { c.Conn, err = net.DialTimeout(network, address, patience) })
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	c.r = bufio.NewReader(c)
	if c.pid, err = c.line(); err != nil {
		return nil, errors.Join(fmt.Errorf("connected, not greeted: %w", err), c.Close())
	}
	return c, nil
}

func (c *conversation) line() (string, error) {
	text, err := c.r.ReadString('\n')
	return strings.TrimSpace(text), err
}

// finish has the process answer, and ends the connection.
func (c *conversation) finish() error {
	defer c.Close()
	if _, err := io.WriteString(c, "who\n"); err != nil {
		return err
	}
	pid, err := c.line()
	if err == nil && pid != c.pid {
		err = fmt.Errorf("%q answers a connection of process %s", pid, c.pid)
	}
	return err
}

// ask returns the pid that answers.
func (m *machine) ask(network, address string) (pid string, err error) {
	if network == "udp" {
		return m.askPacket(address)
	}
	c, err := m.hold(network, address)
	if err != nil {
		return "", err
	}
	return c.pid, c.finish()
}

func (m *machine) askPacket(address string) (pid string, err error) {
	var c net.Conn
	m.ns.Run(func() { c, err = net.Dial("udp", address) })
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err = c.Write([]byte("who")); err != nil {
		return "", err
	}
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	return strings.TrimSpace(string(buf[:n])), err
}

// Where the server is: two sockets of units, and one that it binds itself.
var doors = []struct{ network, address string }{
	{"tcp", "127.0.0.1:443"}, {"tcp", "127.0.0.1:9000"}, {"udp", "127.0.0.1:4433"},
}

// load asks all the time, until the returned function is called; each loss is an
// error.
func (m *machine) load() (end func()) {
	stop := make(chan struct{})
	var workers sync.WaitGroup
	asked := make([]atomic.Int64, len(doors))
	for i, d := range doors {
		for range 2 {
			workers.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if _, err := m.ask(d.network, d.address); err != nil {
						m.t.Errorf("%s %s: %v", d.network, d.address, err)
						return
					}
					asked[i].Add(1)
					time.Sleep(2 * time.Millisecond)
				}
			})
		}
	}
	end = sync.OnceFunc(func() {
		close(stop)
		workers.Wait()
		for i, d := range doors {
			m.t.Logf("%d answers at %s %s", asked[i].Load(), d.network, d.address)
		}
	})
	m.t.Cleanup(end)
	return end
}

// serves checks that the service's main process is the one that serves, and is
// systemd's own child.
func (m *machine) serves(why string) (main string) {
	m.t.Helper()
	p := m.properties("MainPID", "ActiveState")
	main = p["MainPID"]
	for _, d := range doors {
		pid, err := m.ask(d.network, d.address)
		for until := time.Now().Add(patience); d.network == "udp" && err == nil && pid != main && time.Now().Before(until); {
			// The predecessor reads until it has seen that it is superseded.
			pid, err = m.ask(d.network, d.address)
		}
		if err != nil || pid != main {
			m.t.Errorf("%s: process %s answers at %s %s (%v), the main one is %s", why, pid, d.network, d.address, err, main)
		}
	}
	if p["ActiveState"] != "active" {
		m.t.Errorf("%s: the service is %s", why, p["ActiveState"])
	}
	status := m.must("cat", "/proc/"+main+"/status")
	if !strings.Contains(status, "\nPPid:\t1\n") {
		m.t.Errorf("%s: the main process is no child of systemd", why)
	}
	return main
}

// starts is called before the service is started once more: the example leaves a
// service alone that was started five times in a minute.
func (m *machine) starts() {
	m.t.Helper()
	m.must("systemctl", "reset-failed", "app.service")
}

// 50 reloads under load, a successor that fails, and a manager that executes itself
// (E1, E2).
func TestReload(t *testing.T) {
	m := start(t, nil)
	t.Logf("systemd %d", m.version())
	m.must("systemctl", "start", "app.service")
	main := m.serves("after the start")
	end := m.load()
	reload := func(why string) {
		t.Helper()
		m.must("systemctl", "reload", "app.service")
		now := m.serves(why)
		if now == main {
			t.Errorf("%s: process %s is still the main one", why, main)
		}
		main = now
	}
	for n := range 50 {
		reload(fmt.Sprintf("reload %d", n))
	}

	m.must("touch", "/run/app/broken")
	for range 3 {
		if out, err := m.run("systemctl", "reload", "app.service"); err == nil {
			t.Errorf("a reload with a broken successor succeeded: %s", out)
		}
		if now := m.serves("after a broken successor"); now != main {
			t.Errorf("process %s serves after a broken successor, before it %s", now, main)
		}
	}
	m.must("rm", "/run/app/broken")
	reload("after the broken successors")
	m.must("systemctl", "daemon-reload")
	reload("after daemon-reload")
	m.must("systemctl", "daemon-reexec")
	reload("after daemon-reexec")
	end()
	if p := m.properties("Result", "NRestarts", "NFileDescriptorStore", "StatusText"); p["Result"] != "success" ||
		p["NRestarts"] != "0" || p["NFileDescriptorStore"] != "3" || !strings.Contains(p["StatusText"], "serving") {
		t.Errorf("the service is %v", p)
	}
}

func (m *machine) version() int {
	m.t.Helper()
	n, err := strconv.Atoi(strings.Fields(m.must("systemctl", "--version"))[1])
	if err != nil {
		m.t.Fatal(err)
	}
	return n
}

// A reload kills no predecessor that drains, and a stop gives each process its
// grace: the active one alone, and with predecessors (E1).
func TestGrace(t *testing.T) {
	m := start(t, nil)
	m.must("systemctl", "start", "app.service")
	for _, predecessors := range []int{0, 2} {
		m.must("systemctl", "start", "app.service")
		var held []*conversation
		for n := range predecessors + 2 {
			if n > 0 { // also the one that stops was started by a reload
				m.must("systemctl", "reload", "app.service")
			}
			if n == 0 && predecessors == 0 {
				continue
			}
			c, err := m.hold("tcp", doors[n%2].address)
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, c)
		}
		main := m.serves("with conversations")
		if last := held[len(held)-1].pid; last != main {
			t.Errorf("process %s has the last conversation, the main one is %s", last, main)
		}
		m.must("systemctl", "stop", "--no-block", "app.service")
		m.await("deactivating")
		for _, c := range held {
			if err := c.finish(); err != nil {
				t.Errorf("stopped, process %s of %d: %v", c.pid, len(held), err)
			}
		}
		m.await("inactive")
		if result := m.property("Result"); result != "success" {
			t.Errorf("the result of the service is %s", result)
		}
	}
	// What the server bound itself ends with it.
	if c, err := m.hold("tcp", doors[1].address); err == nil {
		t.Errorf("stopped, process %s answers", c.pid)
		_ = c.Close()
	}
}

// A restart keeps what is stored, and what the units have (E3, E6).
func TestRestart(t *testing.T) {
	m := start(t, nil)
	m.must("systemctl", "start", "app.service")
	main := m.serves("after the start")
	end := m.load()
	for n := range 6 {
		m.starts()
		if n%2 == 1 {
			m.must("systemctl", "reload", "app.service")
		}
		m.must("systemctl", "restart", "app.service")
		now := m.serves("after a restart")
		if now == main {
			t.Error("restarted, and the same process serves")
		}
		main = now
		if n := m.property("NFileDescriptorStore"); n != "3" {
			t.Errorf("%s descriptors are in the store, want 3", n)
		}
	}
	end()
}

// After a crash nothing is refused: clients wait for the next start.
func TestCrash(t *testing.T) {
	m := start(t, nil)
	m.must("systemctl", "start", "app.service")
	main := m.serves("after the start")
	crash := func(why string) {
		t.Helper()
		m.starts()
		m.kill(main)
		for _, d := range doors {
			if pid, err := m.ask(d.network, d.address); err != nil || pid == main {
				t.Errorf("%s: process %s answers at %s %s (%v), before it was %s", why, pid, d.network, d.address, err, main)
			}
		}
		m.await("active")
		main = m.serves(why)
	}
	crash("a crash of the first")
	m.must("systemctl", "reload", "app.service")
	main = m.serves("after a reload")
	crash("a crash of a successor")

	// The predecessors that drain have their grace; the next start comes after it.
	c, err := m.hold("tcp", doors[0].address)
	if err != nil {
		t.Fatal(err)
	}
	m.must("systemctl", "reload", "app.service")
	main = m.serves("with a predecessor")
	m.kill(main)
	m.await("deactivating")
	if err := c.finish(); err != nil {
		t.Errorf("a predecessor after the crash of its successor: %v", err)
	}
	if pid, err := m.ask("tcp", doors[1].address); err != nil || pid == main {
		t.Errorf("process %s answers (%v)", pid, err)
	}
	m.await("active")
	main = m.serves("a crash with a predecessor")
	if n := m.property("NFileDescriptorStore"); n != "3" {
		t.Errorf("%s descriptors are in the store, want 3", n)
	}
	crash("a crash after it")
}

// onProbation starts the service and reloads it. It returns when the successor
// serves, which has not stood its probation; done has the error of the reload.
func onProbation(t *testing.T) (m *machine, main, successor string, done <-chan error) {
	t.Helper()
	m = start(t, func(units map[string]string) {
		units["app.service"] = strings.NewReplacer("--control", "--probation 20s --control",
			"TimeoutStartSec=2min", "TimeoutStartSec=10s").Replace(units["app.service"])
	})
	m.must("systemctl", "start", "app.service")
	main = m.serves("after the start")
	failed := make(chan error, 1)
	go func() {
		_, err := m.run("systemctl", "reload", "app.service")
		failed <- err
	}()
	successor = m.another(main)
	if now := m.property("MainPID"); now != main {
		t.Errorf("in the probation the main process is %s, want %s", now, main)
	}
	return m, main, successor, failed
}

// another waits until another process answers. None may be refused meanwhile.
func (m *machine) another(than string) (pid string) {
	m.t.Helper()
	until := time.Now().Add(patience)
	testutil.WaitFor(m.t, patience+time.Second, func() bool {
		if time.Now().After(until) {
			m.t.Fatalf("process %s serves on; the service is %v", than, m.properties("ActiveState", "SubState", "MainPID", "ControlPID", "Result"))
		}
		for _, d := range doors {
			var err error
			if pid, err = m.ask(d.network, d.address); err != nil {
				m.t.Fatalf("%s %s: %v", d.network, d.address, err)
			}
		}
		return pid != than
	}, "another process than %s", than)
	return pid
}

// The successor crashes in its probation: the predecessor takes back, and reload
// fails.
func TestSuccessorCrash(t *testing.T) {
	m, main, successor, done := onProbation(t)
	m.must("kill", "-9", successor)
	if err := <-done; err == nil {
		t.Error("reload succeeded, and the successor crashed")
	}
	if now := m.serves("after the crash"); now != main {
		t.Errorf("process %s serves, before it was %s", now, main)
	}
	if n := m.property("NRestarts"); n != "0" {
		t.Errorf("%s restarts", n)
	}
}

// The predecessor crashes in the probation, when it is still the main process:
// systemd stops the successor, which it does not hear, and starts the service
// again; since 253 only after TimeoutStartSec=, as RELOADING=1 is the last word
// that it heard. The successor serves until then.
func TestPredecessorCrash(t *testing.T) {
	m, main, successor, done := onProbation(t)
	m.tolerant = true
	m.kill(main)
	if err := <-done; err == nil {
		t.Error("reload succeeded, and the predecessor crashed")
	}
	m.another(successor)
	m.await("active")
	m.serves("after the crash")
	if p := m.properties("NRestarts", "NFileDescriptorStore"); p["NRestarts"] != "1" || p["NFileDescriptorStore"] != "3" {
		t.Errorf("the service is %v", p)
	}
}

// Sockets of units come by name, whatever their type, and start the service (E8).
func TestActivation(t *testing.T) {
	m := start(t, func(units map[string]string) {
		units["app-local.socket"] = "[Socket]\nListenStream=/run/app.stream\nFileDescriptorName=local\nService=app.service\n"
		units["app-gram.socket"] = "[Socket]\nListenDatagram=/run/app.gram\nFileDescriptorName=gram\nService=app.service\n"
	})
	m.must("systemctl", "start", "app-gram.socket", "app.socket", "app-local.socket", "app-udp.socket")
	if state := m.property("ActiveState"); state != "inactive" {
		t.Fatalf("before the first client the service is %s", state)
	}
	root := fmt.Sprintf("/proc/%d/root", m.pid)
	all := func(why string) {
		t.Helper()
		main := m.serves(why)
		if pid, err := m.ask("unix", root+"/run/app.stream"); err != nil || pid != main {
			t.Errorf("%s: process %s answers the stream (%v), the main one is %s", why, pid, err, main)
		}
		if pid, err := m.askGram(root, why); err != nil || pid != main {
			t.Errorf("%s: process %s answers the Unix datagram (%v), the main one is %s", why, pid, err, main)
		}
	}
	if _, err := m.ask("tcp", doors[0].address); err != nil { // the first client
		t.Fatal(err)
	}
	m.await("active")
	all("after the activation")
	for range 2 {
		m.must("systemctl", "reload", "app.service")
		all("after a reload")
	}
	m.must("systemctl", "restart", "app.service")
	all("after a restart")
	if n := m.property("NFileDescriptorStore"); n != "5" {
		t.Errorf("%s descriptors are in the store, want 5", n)
	}
	m.must("systemctl", "stop", "app.service")
	if _, err := m.askGram(root, "a client after the stop"); err != nil {
		t.Error(err)
	}
	m.await("active")
	all("after the second activation")
}

// askGram sends a Unix datagram. The answer goes to an abstract name, which is the
// network namespace's: the server's mount namespace has no other.
func (m *machine) askGram(root, why string) (pid string, err error) {
	var c *net.UnixConn
	m.ns.Run(func() {
		c, err = net.DialUnix("unixgram", &net.UnixAddr{Name: fmt.Sprintf("@%s %d", why, time.Now().UnixNano()), Net: "unixgram"},
			&net.UnixAddr{Name: root + "/run/app.gram", Net: "unixgram"})
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("who")); err != nil {
		return "", err
	}
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	return strings.TrimSpace(string(buf[:n])), err
}

// The check of systemd's log finds who speaks and may not.
func TestComplaint(t *testing.T) {
	m := start(t, nil)
	m.tolerant = true
	m.must("systemctl", "start", "app.service")
	m.configure("[Service]\nExecReload=\nExecReload=env NOTIFY_SOCKET=/run/systemd/notify systemd-notify --status=other\n")
	m.must("systemctl", "reload", "app.service")
	testutil.WaitFor(t, patience, func() bool { return len(complaints(m.said())) > 0 }, "a complaint")
	if status := m.property("StatusText"); strings.Contains(status, "other") {
		t.Errorf("the status is %q", status)
	}
}

// A reload by signal (app-reload.service).
func TestNotifyReload(t *testing.T) {
	m := start(t, func(units map[string]string) { units["app.service"] = example(t, "app-reload.service") })
	if v := m.version(); v < 253 {
		t.Skipf("systemd %d is older than 253, which has Type=notify-reload", v)
	}
	m.must("systemctl", "start", "app.service")
	main := m.serves("after the start")
	end := m.load()
	for n := range 20 {
		m.must("systemctl", "reload", "app.service")
		now := m.serves(fmt.Sprintf("reload %d", n))
		if now == main {
			t.Errorf("reload %d: process %s is still the main one", n, main)
		}
		main = now
	}
	m.must("touch", "/run/app/broken")
	m.must("systemctl", "reload", "app.service") // the protocol knows no failure
	if now := m.serves("after a broken successor"); now != main {
		t.Errorf("process %s serves after a broken successor, before it %s", now, main)
	}
	if status := m.property("StatusText"); !strings.Contains(status, "the last upgrade failed") {
		t.Errorf("the status is %q", status)
	}
	end()
}
