// SPDX-License-Identifier: Apache-2.0

package capset

import (
	"bytes"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func TestEffectiveMatchesProc(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	got, err := Effective()
	if err != nil {
		t.Fatal(err)
	}
	if want := procEffective(t); got != want {
		t.Errorf("Effective() = %#x, /proc/thread-self/status has %#x", got, want)
	}
}

// The set is the thread's: a change on one thread shows there.
func TestEffectiveAfterDrop(t *testing.T) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the changed thread ends here
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil {
			t.Errorf("drop capabilities: %v", err)
			return
		}
		if got, err := Effective(); err != nil || got != 0 {
			t.Errorf("Effective() = %#x, %v; want none", got, err)
		}
	}()
	<-done
}

func procEffective(t *testing.T) Set {
	t.Helper()
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(status) {
		if value, ok := bytes.CutPrefix(line, []byte("CapEff:")); ok {
			n, err := strconv.ParseUint(string(bytes.TrimSpace(value)), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			return Set(n)
		}
	}
	t.Fatal("no CapEff in /proc/thread-self/status")
	return 0
}

func TestNames(t *testing.T) {
	for _, tc := range []struct {
		cap  Cap
		want string
	}{
		{Chown, "CAP_CHOWN"},
		{DACOverride, "CAP_DAC_OVERRIDE"},
		{Kill, "CAP_KILL"},
		{SetGID, "CAP_SETGID"},
		{SetUID, "CAP_SETUID"},
		{NetBindService, "CAP_NET_BIND_SERVICE"},
		{NetAdmin, "CAP_NET_ADMIN"},
		{NetRaw, "CAP_NET_RAW"},
		{SysPtrace, "CAP_SYS_PTRACE"},
		{SysAdmin, "CAP_SYS_ADMIN"},
		{SysResource, "CAP_SYS_RESOURCE"},
		{Cap(unix.CAP_SETFCAP), "CAP_SETFCAP"},
		{Cap(unix.CAP_SYSLOG), "CAP_SYSLOG"},
		{Perfmon, "CAP_PERFMON"},
		{BPF, "CAP_BPF"},
		{Last, "CAP_CHECKPOINT_RESTORE"},
		{Last + 1, "capability 41"},
		{-1, "capability -1"},
	} {
		if got := tc.cap.String(); got != tc.want {
			t.Errorf("Cap(%d) = %q, want %q", int(tc.cap), got, tc.want)
		}
	}
	for c, name := range names {
		if name == "" {
			t.Errorf("capability %d has no name", c)
		}
	}
	if got, want := Names([]Cap{BPF, NetAdmin}), "CAP_BPF, CAP_NET_ADMIN"; got != want {
		t.Errorf("Names = %q, want %q", got, want)
	}
	if got := Names(nil); got != "" {
		t.Errorf("Names(nil) = %q", got)
	}
}

func TestMissing(t *testing.T) {
	checkpoint := Cap(unix.CAP_CHECKPOINT_RESTORE)
	for _, tc := range []struct {
		name string
		have Set
		want []Cap
		miss []Cap
	}{
		{"nothing asked", 0, nil, nil},
		{"none", 0, []Cap{BPF, NetAdmin}, []Cap{BPF, NetAdmin}},
		{"one of two", Of(NetAdmin), []Cap{BPF, NetAdmin}, []Cap{BPF}},
		{"asked twice", 0, []Cap{BPF, BPF}, []Cap{BPF}},
		{"SYS_ADMIN stands for what was split off it", Of(SysAdmin), []Cap{BPF, Perfmon, checkpoint, NetAdmin}, []Cap{NetAdmin}},
		{"but not the other way round", Of(BPF, Perfmon), []Cap{SysAdmin}, []Cap{SysAdmin}},
		{"a high number", Of(BPF), []Cap{BPF, Chown}, []Cap{Chown}},
		{"unknown to the kernel", ^Set(0), []Cap{64, -1}, []Cap{64, -1}},
	} {
		if got := tc.have.Missing(tc.want...); !slices.Equal(got, tc.miss) {
			t.Errorf("%s: Missing = %v, want %v", tc.name, got, tc.miss)
		}
	}
	if s := Of(SysAdmin); s.Has(BPF) || !s.Has(SysAdmin) {
		t.Error("Has takes CAP_SYS_ADMIN for CAP_BPF")
	}
}
