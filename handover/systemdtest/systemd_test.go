// SPDX-License-Identifier: Apache-2.0

package systemdtest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"instar/internal/testutil"
)

const patience = 60 * time.Second

// boot is run in new namespaces, makes a root file system and becomes systemd. The
// machine's own is there for reading only, and everything that could be written is
// memory. None of the machine's units is there: they would tidy up the machine.
const boot = `set -e
mount --make-rprivate /
new=$1/root
mount --bind / "$new"
mount -o remount,bind,ro "$new"
mount -t proc proc "$new/proc"
mount -t sysfs -o ro sysfs "$new/sys"
mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
mount --rbind /dev "$new/dev"
for memory in run tmp var usr/lib/systemd/system usr/lib/systemd/system-generators; do
	mount -t tmpfs tmpfs "$new/$memory"
done
mkdir -p "$new/run/lock" "$new/run/old" "$new/var/tmp" "$new/var/lib" "$new/var/log"
mount --bind "$1/units" "$new/etc/systemd/system"
mount --bind "$1/bin" "$new/usr/local/bin"
cd "$new"
pivot_root . run/old
umount -l /run/old
container=test exec /lib/systemd/systemd --system --unit=test.target --log-target=console --show-status=no
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
}

// start boots systemd with the units of examples/systemd.
func start(t testing.TB) *machine {
	t.Helper()
	testutil.NeedRoot(t)
	testutil.NeedCommand(t, "systemctl", "systemd")
	testutil.NeedCommand(t, "nsenter", "util-linux")
	m := &machine{t: t, ns: testutil.NetNS(t)}
	var err error
	if m.dir, err = os.MkdirTemp("", "systemdtest"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(m.dir) })
	if err := os.Chmod(m.dir, 0o755); err != nil { // #nosec G302: the service's user executes what is in it
		t.Fatal(err)
	}
	m.install()

	cgroup, err := os.MkdirTemp(cgroupRoot(t), "systemdtest")
	if err != nil {
		testutil.Skip(t, "no cgroup v2 hierarchy to write to: %v", err)
	}
	m.log = filepath.Join(m.dir, "log")
	out, err := os.Create(m.log)
	if err != nil {
		t.Fatal(err)
	}
	cmd := m.ns.Command("sh", "-c", `echo $$ >"$1/cgroup.procs"; exec unshare --pid --fork --kill-child --mount --mount-proc --uts --ipc --cgroup sh -c "$2" boot "$3"`,
		"boot", cgroup, boot, m.dir)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // PID 1 dies with unshare, and all others with it
		_ = cmd.Wait()
		_ = out.Close()
		testutil.WaitFor(t, patience, func() bool { return removeCgroups(cgroup) == nil }, "the end of the processes")
		if t.Failed() {
			if text, err := os.ReadFile(m.log); err == nil {
				t.Logf("log of systemd:\n%s", text)
			}
		}
	})
	testutil.WaitFor(t, patience, func() bool {
		m.pid = child(cmd.Process.Pid)
		if m.pid == 0 {
			return false
		}
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", m.pid))
		return strings.TrimSpace(string(name)) == "systemd"
	}, "systemd to start")
	testutil.WaitFor(t, patience, func() bool {
		state, _ := m.run("systemctl", "is-system-running")
		return strings.TrimSpace(state) == "running"
	}, "systemd to run")
	return m
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

// install copies the units, with another user, and the programs.
func (m *machine) install() {
	m.t.Helper()
	must := func(err error) {
		m.t.Helper()
		if err != nil {
			m.t.Fatal(err)
		}
	}
	units, bin := filepath.Join(m.dir, "units"), filepath.Join(m.dir, "bin")
	must(os.Mkdir(units, 0o755))
	must(os.Mkdir(bin, 0o755))
	must(os.Mkdir(filepath.Join(m.dir, "root"), 0o755))
	for _, name := range targets {
		must(os.WriteFile(filepath.Join(units, name+".target"), []byte("[Unit]\nDefaultDependencies=no\n"), 0o644))
	}
	for _, name := range []string{"app.service", "app.socket", "app-udp.socket"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "examples", "systemd", name))
		must(err)
		unit := string(text)
		if name == "app.service" {
			unit = regexp.MustCompile(`(?m)^User=.*$`).ReplaceAllString(unit, "User=nobody")
			unit = regexp.MustCompile(`(?m)^Group=.*$`).ReplaceAllString(unit, "Group=nogroup")
		}
		must(os.WriteFile(filepath.Join(units, name), []byte(unit), 0o644))
	}
	self, err := os.ReadFile("/proc/self/exe")
	must(err)
	must(os.WriteFile(filepath.Join(bin, "app"), self, 0o755))
	build := exec.Command("go", "build", "-o", filepath.Join(bin, "instar"), "instar/cmd/instar")
	if out, err := build.CombinedOutput(); err != nil {
		m.t.Fatalf("build instar: %v\n%s", err, out)
	}
}

// run runs a command inside.
func (m *machine) run(args ...string) (string, error) {
	out, err := exec.Command("nsenter", append([]string{"-t", strconv.Itoa(m.pid), "--all"}, args...)...).CombinedOutput()
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

// property reads one of app.service.
func (m *machine) property(name string) string {
	m.t.Helper()
	return strings.TrimSpace(m.must("systemctl", "show", "-p", name, "--value", "app.service"))
}

// ask connects and returns the pid that answers, as it is inside.
func (m *machine) ask(port int) (pid string, err error) {
	m.ns.Run(func() {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), patience); err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err = io.WriteString(c, "who\n"); err != nil {
			return
		}
		pid, err = bufio.NewReader(c).ReadString('\n')
	})
	return strings.TrimSpace(pid), err
}

// load asks all the time, until the returned function is called; it reports what
// was lost.
func (m *machine) load(port int) (end func()) {
	stop := make(chan struct{})
	var workers sync.WaitGroup
	var asked atomic.Int64
	for range 3 {
		workers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := m.ask(port); err != nil {
					m.t.Errorf("port %d: %v", port, err)
					return
				}
				asked.Add(1)
				time.Sleep(time.Millisecond)
			}
		})
	}
	return sync.OnceFunc(func() {
		close(stop)
		workers.Wait()
		m.t.Logf("%d answers at port %d", asked.Load(), port)
	})
}

// serves checks that the service's main process is the one that serves, and is
// systemd's own child.
func (m *machine) serves(why string) (main string) {
	m.t.Helper()
	main = m.property("MainPID")
	for _, port := range []int{443, 9000} {
		if pid, err := m.ask(port); err != nil || pid != main {
			m.t.Errorf("%s: process %s answers at port %d (%v), the main one is %s", why, pid, port, err, main)
		}
	}
	if state := m.property("ActiveState"); state != "active" {
		m.t.Errorf("%s: the service is %s", why, state)
	}
	status := m.must("cat", "/proc/"+main+"/status")
	if !strings.Contains(status, "\nPPid:\t1\n") {
		m.t.Errorf("%s: the main process is no child of systemd", why)
	}
	return main
}

// A real systemd: 50 reloads under load, a successor that fails, a restart that
// keeps the sockets, a crash and a stop. The units are those of the examples (E1,
// E2, E3, E6, E8).
func TestSystemd(t *testing.T) {
	m := start(t)
	t.Logf("systemd %s", strings.Fields(m.must("systemctl", "--version"))[1])
	m.must("systemctl", "start", "app.service")
	main := m.serves("after the start")

	https, admin := m.load(443), m.load(9000)
	defer https()
	defer admin()
	for n := range 50 {
		m.must("systemctl", "reload", "app.service")
		now := m.serves(fmt.Sprintf("reload %d", n))
		if now == main {
			t.Errorf("reload %d: process %s is still the main one", n, main)
		}
		main = now
	}

	m.must("touch", "/run/app/broken")
	if out, err := m.run("systemctl", "reload", "app.service"); err == nil {
		t.Errorf("a reload with a broken successor succeeded: %s", out)
	}
	m.must("rm", "/run/app/broken")
	if now := m.serves("after a broken successor"); now != main {
		t.Errorf("process %s serves after a broken successor, before it %s", now, main)
	}
	m.must("systemctl", "reload", "app.service")
	main = m.serves("after the next reload")

	// One socket is the manager's, the other is kept in its store.
	m.must("systemctl", "restart", "app.service")
	if now := m.serves("after a restart"); now == main {
		t.Error("restarted, and the same process serves")
	}
	https()
	admin()
	if n := m.property("NFileDescriptorStore"); n != "2" {
		t.Errorf("%s descriptors are in the store, want 2", n)
	}

	main = m.property("MainPID")
	m.must("kill", "-9", main)
	testutil.WaitFor(t, patience, func() bool {
		now := m.property("MainPID")
		return now != main && now != "0" && m.property("ActiveState") == "active"
	}, "the restart after a crash")
	m.serves("after a crash")

	m.must("systemctl", "stop", "app.service")
	if result := m.property("Result"); result != "success" {
		t.Errorf("the result of the service is %s", result)
	}
	text, err := os.ReadFile(m.log)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "reception only permitted") {
		t.Error("a process spoke that is not the main one")
	}
}
