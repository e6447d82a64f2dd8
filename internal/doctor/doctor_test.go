// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/capset"
	"instar/internal/kernel"
	"instar/internal/kerneltest"
	"instar/internal/testutil"
)

// bpfProgLoad is BPF_PROG_LOAD of bpf(2).
const bpfProgLoad = 5

// A machine with nothing wrong: no check has a problem, and those of groups are content.
func TestFine(t *testing.T) {
	m := newMachine(t)
	m.serve("udp", "127.0.0.1:4433")
	m.serve("udp", "[::]:4434")
	found := m.examine(Options{})
	for _, f := range found {
		if f.Result == Problem {
			t.Errorf("%s: %s", f.Check, f.Reason)
		}
		if (f.Result == Warning) != (f.Result == Warning && f.Cure != "") {
			t.Errorf("%s has no cure for: %s", f.Check, f.Reason)
		}
	}
	found.wantOK(t, "bpf", "capabilities", "seccomp", "userns", "bpffs", "groups", "ports", "conntrack", "owner", "strangers", "dualstack", "reuseaddr", "gro", "migrate")
	found.want(t, "groups", OK, "2 groups", "")
	found.want(t, "handover", Unknown, "no control socket was named", "--socket")
	names, about := Checks()
	for i, name := range names {
		if about[i] == "" || len(found.of(name)) == 0 {
			t.Errorf("%s says nothing (%s)", name, about[i])
		}
	}
}

func TestKernel(t *testing.T) {
	found := examine(t, Options{Root: t.TempDir()}, uname26)
	found.want(t, "kernel", Problem, "Linux 2.6 is running, and 5.10 is the oldest", "run Linux 5.10 or later")

	old := &exam{kernel: kernel.Version{Major: 5, Minor: 13}}
	got := findings(checkKernel(old))[0]
	if got.Result != Warning || !strings.Contains(got.Reason, "TCP listeners have no generations") ||
		strings.Contains(got.Reason, "locked memory") || got.Cure != "run Linux 5.19 or later where that matters" {
		t.Errorf("Linux 5.13: %+v", got)
	}
	if got := checkKernel(&exam{kernel: kernel.Version{Major: 5, Minor: 19}})[0]; got.Result != OK {
		t.Errorf("Linux 5.19: %+v", got)
	}
}

// What kernels lack is what the tests of the kernels say.
func TestLacks(t *testing.T) {
	if floor != kerneltest.Floor {
		t.Errorf("the oldest kernel is %v, want %v", floor, kerneltest.Floor)
	}
	for _, l := range lacks {
		i := slices.IndexFunc(kerneltest.Features, func(f kerneltest.Feature) bool { return f.Name == l.feature })
		if i < 0 || kerneltest.Features[i].Since != l.since {
			t.Errorf("%s is said to work since Linux %v", l.feature, l.since)
		}
	}
}

func TestBPF(t *testing.T) {
	m := newMachine(t)
	for _, c := range []struct {
		name            string
		prepare         func() error
		result          Result
		reason, cure    string
		seccomp         Result
		sreason, swhere string
	}{
		{"refused", refuse(unix.EPERM), Problem, "the capabilities are there, and bpf(2) makes no map: operation not permitted", "seccomp filter",
			Warning, "bpf(2) does not work", "SystemCallFilter=bpf"},
		{"not there", refuse(unix.ENOSYS), Problem, "there is no bpf(2)", "CONFIG_BPF_SYSCALL", Warning, "bpf(2) does not work", "seccomp profile"},
		{"no programs", refuse(unix.EACCES, bpfProgLoad), Problem, "maps can be made, and no program can be loaded: permission denied", "security module",
			Warning, "bpf(2) does not work", "seccomp profile"},
		{"another filter", refuse(unix.EPERM, 4711), OK, "makes maps and loads programs", "", OK, "lets bpf(2) through", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			found := m.examine(Options{}, c.prepare)
			found.want(t, "bpf", c.result, c.reason, c.cure)
			found.want(t, "seccomp", c.seccomp, c.sreason, c.swhere)
		})
	}
}

func TestCapabilities(t *testing.T) {
	m := newMachine(t)
	for _, c := range []struct {
		lost capset.Cap
		why  string
	}{
		{capset.BPF, "CAP_BPF, which makes maps"}, {capset.NetAdmin, "CAP_NET_ADMIN, which loads programs for sockets"}, {capset.Perfmon, "CAP_PERFMON, which lets a program read"},
	} {
		kept := slices.DeleteFunc(slices.Clone(groupCapabilities), func(k capset.Cap) bool { return k == c.lost })
		found := m.examine(Options{}, drop(kept...))
		found.want(t, "capabilities", Problem, "this process lacks "+c.why, "instar prepare --owner USER")
	}
	found := m.examine(Options{}, drop())
	if n := len(found.of("capabilities")); n != 3 {
		t.Errorf("%d findings without any capability, want 3", n)
	}
	found.want(t, "bpf", Unknown, "cannot be told without CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON", "run the doctor as root")

	found = m.examine(Options{}, refuse(unix.EPERM), drop())
	found.want(t, "seccomp", Unknown, "whether it lets bpf(2) through cannot be told", "run the doctor with CAP_BPF")

	// A server that joins a group which was made for it needs none.
	found = m.examine(Options{}, becomeNobody)
	for _, f := range found.of("capabilities") {
		if f.Result != Warning {
			t.Errorf("to nobody: %+v", f)
		}
	}
	if len(found.of("capabilities")) != 3 {
		t.Errorf("to nobody: %v", found.of("capabilities"))
	}
	testutil.Since(t, kernel.Version{Major: 5, Minor: 19}, "maps of others without CAP_BPF")
	g := m.open(m.options("udp", "127.0.0.1:4433"))
	found = m.examine(Options{Paths: []string{g.Path()}}, drop(capset.DACOverride))
	found.want(t, "capabilities", OK, "needs no capability to use it", "")
}

func TestMemlock(t *testing.T) {
	testutil.NeedRoot(t)
	p := limited.Start(t, testutil.Options{Args: []string{t.TempDir()}})
	if line := p.Recv(); !strings.HasPrefix(line, "the hard limit is ") && line != "ok: RLIMIT_MEMLOCK is no limit for this process -> " {
		t.Errorf("without a limit: %s", line)
	}
	p.Expect("problem: Linux 2.6 counts maps and programs as locked memory, of which this process may have 65536 bytes " +
		"-> raise RLIMIT_MEMLOCK (a unit's LimitMEMLOCK=infinity), or add CAP_SYS_RESOURCE")
}

// Settings of the kernel as a whole stay as they are: another file is put over theirs.
func TestSettings(t *testing.T) {
	testutil.NeedRoot(t)
	for _, c := range []struct {
		file, content string
		prepare       func() error
		check         string
		result        Result
		reason, cure  string
	}{
		{"net/core/bpf_jit_enable", "0", nil, "jit", Warning, "net.core.bpf_jit_enable is 0", "sysctl -w net.core.bpf_jit_enable=1"},
		{"net/core/bpf_jit_enable", "1", nil, "jit", OK, "are compiled", ""},
		{"net/core/bpf_jit_enable", "what", nil, "jit", Unknown, "invalid syntax", "run the doctor as root"},
		{"net/core/rmem_max", "212992", nil, "rmem", Warning, "net.core.rmem_max is 212992 bytes", "sysctl -w net.core.rmem_max=8388608"},
		{"net/core/rmem_max", "8388608", nil, "rmem", OK, "8388608", ""},
		{"kernel/unprivileged_bpf_disabled", "2", uname26, "unprivileged", Warning, "on Linux 2.6 a server needs CAP_BPF to join", "run Linux 5.19 or later"},
		{"kernel/unprivileged_bpf_disabled", "0", uname26, "unprivileged", OK, "can join", ""},
	} {
		prepare := []func() error{over(t, "/proc/sys/"+c.file, c.content+"\n")}
		if c.prepare != nil {
			prepare = append(prepare, c.prepare)
		}
		examine(t, Options{Root: t.TempDir()}, prepare...).want(t, c.check, c.result, c.reason, c.cure)
	}
	// They are not in other network namespaces.
	found := newMachine(t).examine(Options{})
	found.want(t, "jit", Unknown, "does not have the setting", "initial network namespace")
}

func TestCgroup(t *testing.T) {
	testutil.NeedRoot(t)
	c, err := controlGroups()
	if err != nil {
		t.Fatal(err)
	}
	dir, limit, usage := c.memory()
	if limit != "memory.limit_in_bytes" {
		t.Skip("the memory of this process is not in a control group of version 1, whose members are threads; TestHeadroom reads the files of version 2")
	}
	small := filepath.Join(dir, fmt.Sprintf("instar-test-%d", os.Getpid()))
	if err := os.Mkdir(small, 0o755); err != nil {
		testutil.Skip(t, "needs a control group that it may divide: %v", err)
	}
	defer func() {
		// The thread of the examination has to be gone.
		testutil.WaitFor(t, 10*time.Second, func() bool { return os.Remove(small) == nil }, "to remove %s", small)
	}()
	if err := os.WriteFile(filepath.Join(small, limit), []byte(strconv.Itoa(8<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	if free, limited, err := headroom(small, limit, usage); err != nil || !limited || free <= 0 || free > 8<<20 {
		t.Fatalf("%d bytes are free, limited: %v, %v", free, limited, err)
	}
	found := examine(t, Options{Root: t.TempDir()}, func() error {
		return os.WriteFile(filepath.Join(small, "tasks"), []byte(strconv.Itoa(unix.Gettid())), 0o600)
	})
	found.want(t, "cgroup", Problem, "control group "+small+" has room for ", "MemoryMax=")
}

func TestCgroup2(t *testing.T) {
	m := newMachine(t)
	if c, err := controlGroups(); err != nil || c.v2 == "" {
		testutil.Skip(t, "needs control groups of version 2: mount them (%v)", err)
	}
	m.examine(Options{}).want(t, "cgroup2", OK, "version 2 are mounted", "")
	without := func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
		for {
			mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
			if err != nil {
				return err
			}
			at := regexp.MustCompile(`(?m)^\S+ \S+ \S+ \S+ (\S+) .* - cgroup2 `).FindSubmatch(mounts)
			if at == nil {
				return nil
			}
			if err := unix.Unmount(string(at[1]), unix.MNT_DETACH); err != nil {
				return os.NewSyscallError("umount", err)
			}
		}
	}
	m.examine(Options{}, without).want(t, "cgroup2", Warning, "servers cannot learn flows by their answers", "mount -t cgroup2")
	o := m.options("udp", "127.0.0.1:7007")
	o.Steering, o.FlowLearning = dispatch.SteeringFlow, dispatch.LearnAnswered
	m.open(o)
	m.examine(Options{}, without).want(t, "cgroup2", Problem, "they cannot join", "mount -t cgroup2")
}

func TestHeadroom(t *testing.T) {
	for _, c := range []struct {
		most, used string
		free       int64
		limited    bool
		fails      bool
	}{
		{"max\n", "5\n", 0, false, false},
		{"1000\n", "400\n", 600, true, false},
		{"1000\n", "1400\n", -400, true, false},
		{"9223372036854771712\n", "4096\n", 9223372036854767616, true, false},
		{"much\n", "1\n", 0, false, true},
	} {
		dir := t.TempDir()
		for name, text := range map[string]string{"memory.max": c.most, "memory.current": c.used} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		free, limited, err := headroom(dir, "memory.max", "memory.current")
		if free != c.free || limited != c.limited || (err != nil) != c.fails {
			t.Errorf("%q of %q: %d %v %v", c.used, c.most, free, limited, err)
		}
	}
	if _, _, err := headroom(t.TempDir(), "memory.max", "memory.current"); err == nil {
		t.Error("no files, and no error")
	}
}

func TestBPFFS(t *testing.T) {
	m := newMachine(t)
	none := filepath.Join(t.TempDir(), "none")
	found := m.examine(Options{Root: none})
	found.want(t, "bpffs", Problem, none+" is not on a bpffs", "mount -t bpf bpf /sys/fs/bpf")
	found.want(t, "groups", Unknown, "could not be listed", "")

	found = m.examine(Options{})
	found.want(t, "bpffs", OK, "the first group makes it", "")
	g := m.open(m.options("udp", "127.0.0.1:4433"))
	pin := filepath.Join(g.Path(), "control")
	m.examine(Options{Root: pin}).want(t, "bpffs", Problem, pin+": not a directory", "look at that folder")
	m.must(os.Chown(m.root, 65534, 65534))
	m.examine(Options{}).want(t, "bpffs", Problem, "belongs to uid 65534, who could replace the groups", "chown root:root "+m.root)
	m.must(os.Chown(m.root, 0, 0))
	m.must(os.Chmod(m.root, 0o777))
	m.examine(Options{}).want(t, "bpffs", Problem, "everybody may write", "chmod o-w "+m.root)
	m.must(os.Chmod(m.root, 0o700))
	found = m.examine(Options{}, becomeNobody)
	found.want(t, "bpffs", Unknown, "not permitted", "run the doctor as root")
	found.want(t, "strangers", Unknown, "the groups could not be listed", "run the doctor as root")
}

func TestGroups(t *testing.T) {
	m := newMachine(t)
	g, _ := m.serve("udp", "127.0.0.1:4433")
	m.examine(Options{}, becomeNobody).want(t, "groups", Unknown, "uid 0", "run the doctor as uid 0, or as root")

	strange := filepath.Join(filepath.Dir(g.Path()), "udp4-strange")
	m.must(os.Mkdir(strange, 0o755))
	m.examine(Options{}).want(t, "groups", Problem, `pin "control" is missing`, "instar forget "+strange)
	m.must(os.Remove(strange))
	found := m.examine(Options{Paths: []string{strange}})
	found.want(t, "groups", Problem, "does not exist", "forget")

	// Who is killed leaves a generation without a socket, until somebody writes.
	p := server.Start(t, testutil.Options{Args: []string{m.root, "127.0.0.1:4434"}, NS: m.ns})
	p.Expect("serves")
	m.examine(Options{}).wantOK(t, "groups")
	p.Kill()
	m.examine(Options{}).want(t, "groups", Problem, "its generations are dead: nobody serves", "start the server")

	m.examine(Options{Address: &dispatch.Options{Address: "127.0.0.1:4435", Device: "none0"}}).want(t, "groups", Unknown, "find device none0", "")
	other := testutil.OtherNetNS(t)
	found = examine(t, Options{Root: m.root, Paths: []string{g.Path()}}, func() error { return unix.Setns(other.FD(), unix.CLONE_NEWNET) })
	found.want(t, "groups", Unknown, "it is in network namespace", "nsenter --net=")
	for _, check := range []string{"owner", "strangers", "dualstack", "reuseaddr", "gro"} {
		found.want(t, check, Unknown, "1 of 1 groups", `do what the check "groups" says`)
	}
}

func TestSomaxconn(t *testing.T) {
	m := newMachine(t)
	short := func() error { return os.WriteFile("/proc/sys/net/core/somaxconn", []byte("128"), 0o600) }
	m.examine(Options{}, short).want(t, "somaxconn", Warning, "net.core.somaxconn is 128", "sysctl -w net.core.somaxconn=4096")
}

// Field I11: what waits at a listener that closes.
func TestMigrate(t *testing.T) {
	m := newMachine(t)
	testutil.Since(t, kernel.Version{Major: 5, Minor: 14}, "net.ipv4.tcp_migrate_req")
	m.bind(nil, "tcp", "127.0.0.1:8080", "tcp", "127.0.0.1:8080")
	address := Options{Address: &dispatch.Options{Network: "tcp", Address: "127.0.0.1:8080"}}
	m.examine(address).want(t, "migrate", Warning, "2 listeners share tcp4 127.0.0.1:8080 without a group", "net.ipv4.tcp_migrate_req=1")
	on := func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_migrate_req", []byte("1"), 0o600) }
	m.examine(address, on).want(t, "migrate", OK, "it is 1", "")
}

// Field I7: a port below 1024.
func TestPorts(t *testing.T) {
	m := newMachine(t)
	found := m.examine(Options{Address: &dispatch.Options{Address: "127.0.0.1:443"}}, drop())
	found.want(t, "ports", Problem, "this process lacks CAP_NET_BIND_SERVICE: it cannot bind", "net.ipv4.ip_unprivileged_port_start=443")
	_, err := dispatch.Prepare(m.options("udp", "127.0.0.1:443"), dispatch.Owner{UID: 65534, GID: 65534})
	m.must(err)
	m.examine(Options{}).want(t, "ports", Warning, "the group's owner, uid 65534", "AmbientCapabilities=CAP_NET_BIND_SERVICE")
	low := func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("443"), 0o600)
	}
	m.examine(Options{}, low).want(t, "ports", OK, "ports from 443 on", "")
}

func TestConntrack(t *testing.T) {
	m := newMachine(t)
	m.open(m.options("udp", "127.0.0.1:4433"))
	if _, err := setting("net/netfilter/nf_conntrack_count"); err != nil {
		testutil.Skip(t, "needs nf_conntrack: load the module (%v)", err)
	}
	a, b := net.IPv4(192, 0, 2, 1), net.IPv4(192, 0, 2, 2)
	flow := &netlink.ConntrackFlow{FamilyType: unix.AF_INET, TimeOut: 600,
		Forward: netlink.IPTuple{SrcIP: a, DstIP: b, SrcPort: 1000, DstPort: 443, Protocol: unix.IPPROTO_UDP},
		Reverse: netlink.IPTuple{SrcIP: b, DstIP: a, SrcPort: 443, DstPort: 1000, Protocol: unix.IPPROTO_UDP}}
	if err := netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow); err != nil {
		testutil.Skip(t, "needs a kernel whose table of connections can be written (nf_conntrack_netlink): %v", err)
	}
	m.examine(Options{}).want(t, "conntrack", Warning, "tracks 1 connections", "udp dport 4433 notrack")
	full := over(t, "/proc/sys/net/netfilter/nf_conntrack_max", "1\n")
	m.examine(Options{}, full).want(t, "conntrack", Problem, "tracks 1 connections and has room for 1", "raise net.netfilter.nf_conntrack_max")
}

// Field E5: the successor may not bind.
func TestOwner(t *testing.T) {
	m := newMachine(t)
	g, _ := m.serve("udp", "127.0.0.1:4433")
	m.must(os.Chown(g.Path(), 65534, 65534))
	m.examine(Options{}).want(t, "owner", Problem, "its sockets belong to uid 0 and its pins to uid 65534", "instar prepare --owner 0")
	m.must(os.Chown(g.Path(), 0, 0))

	p := server.Start(t, testutil.Options{Args: []string{m.root, "127.0.0.1:4434"}, NS: m.ns})
	p.Expect("serves")
	m.examine(Options{}).wantOK(t, "owner")
	p.Send("become nobody")
	p.Expect("became nobody")
	m.examine(Options{}).want(t, "owner", Warning, fmt.Sprintf("exe (pid %d) bound its sockets as uid 0 and runs as uid 65534 now", p.PID), "bind as the user")
}

// Field A2: somebody joins the port silently.
func TestStrangers(t *testing.T) {
	m := newMachine(t)
	g, _ := m.serve("udp4", "127.0.0.1:4433")
	m.bind(nil, "udp4", "127.0.0.1:4433")
	m.examine(Options{}).want(t, "strangers", Problem, "is not registered with the group", `as service "test", so that it joins`)

	address := Options{Address: &dispatch.Options{Address: "127.0.0.1:4439"}}
	m.examine(address).wantOK(t, "strangers")
	m.bind(nil, "udp4", "127.0.0.1:4439")
	found := m.examine(address)
	found.want(t, "strangers", Problem, "a socket on udp4 127.0.0.1:4439 (exe (pid ", "start it through Instar")
	// Who may not look into the process says so.
	found = m.examine(address, becomeNobody)
	found.want(t, "strangers", Problem, "(of uid 0; its process cannot be seen from here)", "stop that process")

	m.serve("udp4", "0.0.0.0:4434")
	narrow, wide := Options{Paths: []string{filepath.Join(filepath.Dir(g.Path()), "udp4-0%2e0%2e0%2e0-4434")}}, Options{}
	m.bind(nil, "udp4", "127.0.0.1:4434")
	m.examine(narrow).want(t, "strangers", Problem, "is more specific and takes its packets from the group", "bind the same address")
	specific, _ := m.serve("udp4", "127.0.0.1:4435")
	wide.Paths = []string{specific.Path()}
	m.bind(nil, "udp4", "0.0.0.0:4435")
	m.examine(wide).want(t, "strangers", Warning, "is less specific", "bind the same address")

	// On one device, beside all.
	all, _ := m.serve("udp4", "127.0.0.1:4437")
	onDevice := net.ListenConfig{Control: func(network, address string, raw syscall.RawConn) (err error) {
		cerr := raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "lo") })
		return errors.Join(reusePort(network, address, raw), cerr, err)
	}}
	d, err := onDevice.ListenPacket(context.Background(), "udp4", "127.0.0.1:4437")
	m.must(err)
	defer d.Close()
	m.examine(Options{Paths: []string{all.Path()}}).want(t, "strangers", Warning, "by the order of binding", "bind the same address")

	// A socket that a member bound aside.
	own, _ := m.serve("udp4", "127.0.0.1:4436")
	config := net.ListenConfig{Control: reusePort}
	c, err := config.ListenPacket(context.Background(), "udp4", "127.0.0.1:4436")
	m.must(err)
	defer c.Close()
	m.examine(Options{Paths: []string{own.Path()}}).want(t, "strangers", Warning, "its process is a member", "look again in a moment")
}

func TestDualStack(t *testing.T) {
	m := newMachine(t)
	both, _ := m.serve("udp", "[::]:4433")
	m.bind(nil, "udp4", "0.0.0.0:4433")
	found := m.examine(Options{Paths: []string{both.Path()}})
	found.want(t, "dualstack", Problem, "takes one IP family from the group", `network "udp4" and "udp6"`)
	found.wantOK(t, "strangers")
	four, _ := m.serve("udp4", "0.0.0.0:4434")
	m.bind(nil, "udp", "[::]:4434")
	found = m.examine(Options{Paths: []string{four.Path()}})
	found.want(t, "dualstack", Warning, "is of both IP families", "stop that process")
	six, _ := m.serve("udp6", "[::]:4435")
	m.bind(nil, "udp", "[::]:4435")
	found = m.examine(Options{Paths: []string{six.Path()}})
	found.want(t, "dualstack", Warning, "the order of binding decides", "stop that process")
	// One of its own family alone is no clash.
	six, _ = m.serve("udp6", "[::]:4436")
	m.bind(nil, "udp4", "0.0.0.0:4436")
	m.examine(Options{Paths: []string{six.Path()}}).wantOK(t, "dualstack", "strangers")
}

func TestReuseAddr(t *testing.T) {
	m := newMachine(t)
	_, n := m.serve("udp", "127.0.0.1:4433")
	m.setOption(n, unix.SOL_SOCKET, unix.SO_REUSEADDR)
	m.examine(Options{}).want(t, "reuseaddr", Warning, fmt.Sprintf("(pid %d) have SO_REUSEADDR", os.Getpid()), "SO_REUSEPORT is enough")
	found := m.examine(Options{}, drop(capset.BPF, capset.DACOverride, capset.NetAdmin))
	found.want(t, "reuseaddr", Warning, "", "do not set it") // of this process itself
	p := server.Start(t, testutil.Options{Args: []string{m.root, "127.0.0.1:4434"}, NS: m.ns, As: &testutil.Identity{UID: 0, GID: 0, Caps: append([]capset.Cap{capset.DACOverride}, groupCapabilities...)}})
	p.Expect("serves")
	path := Options{Paths: []string{filepath.Join(filepath.Dir(n.Group().Path()), "udp4-127%2e0%2e0%2e1-4434")}}
	m.examine(path).wantOK(t, "reuseaddr", "gro")
	testutil.Since(t, kernel.Version{Major: 5, Minor: 19}, "groups cannot be read without CAP_BPF")
	found = m.examine(path, drop())
	found.want(t, "reuseaddr", Unknown, "options of 2 of its sockets", "run the doctor as root")
	found.want(t, "gro", Unknown, "options of 2 of its sockets", "run the doctor as root")
}

func TestOffload(t *testing.T) {
	m := newMachine(t)
	_, n := m.serve("udp", "127.0.0.1:4433")
	m.setOption(n, unix.SOL_UDP, unix.UDP_GRO)
	m.examine(Options{}).want(t, "gro", Warning, "have UDP_GRO", "leave UDP_GRO off")
	flow := m.options("udp", "127.0.0.1:4434")
	flow.Steering = dispatch.SteeringFlow
	g := m.open(flow)
	one, err := g.Join(1)
	m.must(err)
	defer func() { m.must(one.Close()) }()
	m.setOption(one, unix.SOL_UDP, unix.UDP_GRO)
	// All packets of a sender go to the same process there.
	m.examine(Options{Paths: []string{g.Path()}}).wantOK(t, "gro")

	e, err := ethtool.NewEthtool()
	m.must(err)
	defer e.Close()
	if err := e.Change("lo", map[string]bool{"rx-udp-gro-forwarding": true}); err != nil {
		testutil.Skip(t, "needs a device with rx-udp-gro-forwarding: %v", err)
	}
	found := m.examine(Options{Paths: []string{g.Path()}})
	found.want(t, "gro", Warning, "(lo rx-udp-gro-forwarding)", "ethtool -K lo rx-udp-gro-forwarding off")
}

// Field F3: a forgotten metrics or admin port.
func TestHandover(t *testing.T) {
	m := newMachine(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "app.sock")
	p := app.Start(t, testutil.Options{Args: []string{m.root, dir}, NS: m.ns})
	p.Expect("ready")
	o := Options{Sockets: []string{socket}}
	m.examine(o).want(t, "handover", OK, "successors get every listener", "")

	p.Send("tcp 127.0.0.1:6060")
	p.Expect("bound")
	m.examine(o).want(t, "handover", Problem, fmt.Sprintf("the listener on tcp 127.0.0.1:6060 of app (pid %d) is not handed over", p.PID), "Handover.Listen")
	p.Send("unix %s", filepath.Join(dir, "x.sock"))
	p.Expect("bound")
	p.Send("udp 127.0.0.1:514")
	p.Expect("bound")
	p.Send("udp 127.0.0.1:0") // a client
	p.Expect("bound")
	found := m.examine(o).of("handover")
	if len(found) != 3 || !strings.Contains(found[1].Reason, "unix "+filepath.Join(dir, "x.sock")) || !strings.Contains(found[2].Reason, "udp 127.0.0.1:514") {
		t.Errorf("%v", found)
	}

	m.examine(Options{Sockets: []string{socket + "-none"}}).want(t, "handover", Problem, "no server has its control socket there", "name another control socket")
	m.must(os.Chmod(filepath.Dir(dir), 0o755))
	m.must(os.Chmod(socket, 0o777))
	m.examine(o, becomeNobody).want(t, "handover", Unknown, "peer is not allowed", "run the doctor as root")
	m.must(os.Chmod(socket, 0o700))
	m.examine(o, becomeNobody).want(t, "handover", Unknown, "permission denied", "run the doctor as root")
	elsewhere := testutil.OtherNetNS(t)
	found = m.examine(o, func() error { return unix.Setns(elsewhere.FD(), unix.CLONE_NEWNET) })
	found.want(t, "handover", Unknown, "is in another network namespace", "nsenter")

	// Somebody who never answers.
	silent, err := net.Listen("unixpacket", filepath.Join(dir, "silent.sock"))
	m.must(err)
	defer silent.Close()
	before := answerTimeout
	defer func() { answerTimeout = before }()
	answerTimeout = time.Millisecond
	m.examine(Options{Sockets: []string{silent.Addr().String()}}).want(t, "handover", Problem, "does not answer", "it starts, hangs")
}
