// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch/connid"
	"instar/internal/sockdiag"
)

// OnStep calls f between the steps of all changes of this process, until the
// test ends.
func OnStep(t testing.TB, f func(done string)) {
	old := testStep
	testStep = f
	t.Cleanup(func() { testStep = old })
}

// HoldAtSteps is OnStep for a process that is going to be killed.
func HoldAtSteps(f func(done string)) { testStep = f }

// Limits that tests change, and put back when they end. No group may be in use
// at both moments.

func SetLockWait(t testing.TB, d time.Duration)    { set(t, &lockWait, d) }
func SetGuardEvery(t testing.TB, d time.Duration)  { set(t, &guardEvery, d) }
func SetUnreadLimit(t testing.TB, d time.Duration) { set(t, &unreadLimit, d) }

func set[T any](t testing.TB, p *T, v T) {
	old := *p
	*p = v
	t.Cleanup(func() { *p = old })
}

// Control is the group's table in mapped memory.
func (g *Group) Control() *bpf.Control { return g.table.Control }

// SetProgramBuild makes the table say that the group has another build of the
// program.
func (g *Group) SetProgramBuild(build string) { setText(g.table.Program[:], build) }

// Codec is the group's codec of connection IDs.
func (g *Group) Codec() *connid.Codec { return g.codec }

// Namespace names the network namespace of the calling thread as folders do.
func Namespace() (string, error) { return namespaceName() }

// Relate compares a socket with the address of a group: "apart", "same",
// "narrower", "wider" or "contested".
func Relate(o Options, s sockdiag.Socket, device int) (string, error) {
	k, err := parseKey(o.Network, o.Address, o.Device)
	return map[relation]string{apart: "apart", same: "same", narrower: "narrower", wider: "wider", contested: "contested"}[k.relate(s, device)], err
}

// The rules of the order of last resort.
var (
	Staged   = staged
	Promoted = promoted
	Without  = without
)

// Wake looks at the table, as the watch does when another process changed it.
func (g *Group) Wake() { g.watch.wake() }

// Table is a control map's memory with no kernel behind it.
type Table struct{ table }

// NewTable maps memory for a table until the test ends.
func NewTable(t testing.TB) Table {
	memory, err := unix.Mmap(-1, 0, int(unsafe.Sizeof(bpf.Control{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(memory) })
	return Table{table{Control: (*bpf.Control)(unsafe.Pointer(&memory[0])), generations: uint32(bpf.MaxSlots)}}
}

// SetSettle is for processes of a test that are many: how long sockets may take to go.
func SetSettle(d time.Duration) { settle = d }

// Change publishes an order as a transaction does.
func (t Table) Change(slots []uint8, activated int) {
	t.publish(slots, activated)
	atomic.AddUint64(&t.Changes, 1)
}

// State is Generation.State.
func (t Table) State(slot uint8, number uint32) State { return t.state(slot, number) }

// ProgramBuild is the build of the program that this library carries.
func ProgramBuild(s Steering) string { return bpf.Build(uint32(s), nil) }

// ControlGroup finds the folder of a control group in what /proc/self/cgroup and
// /proc/self/mountinfo say, and OwnControlGroup that of this process.
var (
	ControlGroup    = controlGroupOf
	OwnControlGroup = controlGroup
)

// FolderName is the name of a group's folder.
func FolderName(o Options) (string, error) {
	k, err := parseKey(o.Network, o.Address, o.Device)
	return k.folder(), err
}

// ExplainLoad says why the kernel refused the data plane.
func ExplainLoad(err error, s Steering) error { return explainLoad(err, s) }

// MountPointFor suggests where to mount a bpffs for a root.
func MountPointFor(root string) string { return mountPointFor(root) }

// Program is the program that this process has.
func (g *Group) Program() *ebpf.Program { return g.pins.program }

// Slot is where the generation is in the table.
func (n *Generation) Slot() uint8 { return n.slot }

// Look is how a generation looked: times are seconds of the table's clock.
type Look struct {
	Joined, Activated, Superseded uint64
	Dead                          bool
}

// ChangesOf is changesOf of two looks.
func ChangesOf(before, after map[uint32]Look, alive bool) []Change {
	convert := func(looks map[uint32]Look) map[uint32]seen {
		all := make(map[uint32]seen)
		for number, l := range looks {
			s := uint64(time.Second)
			all[number] = seen{dead: l.Dead, info: bpf.Info{Number: number, Joined: l.Joined * s, Activated: l.Activated * s, Superseded: l.Superseded * s}}
		}
		return all
	}
	return changesOf(convert(before), convert(after), func(*bpf.Info) bool { return alive })
}
