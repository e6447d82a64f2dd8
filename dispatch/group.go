// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch/connid"
	"instar/internal/build"
)

// Group is a process's hold on a group: its sockets' address, its table of
// generations and its data plane. Close it when done; the group stays.
type Group struct {
	home home
	// namespace is the name of the network namespace.
	namespace string
	key       key
	service   string
	table     table
	pins      *pins
	secrets   bpf.Secrets
	codec     *connid.Codec
	build     string
	dissector *Dissector

	allowOverlap  bool
	receiveBuffer int
	log           *slog.Logger

	watch *watch

	// writer is held by the one goroutine that has the folder's lock, or waits
	// for it.
	writer sync.Mutex
	// mu is held by those who use the pins, and exclusively by Close.
	mu     sync.RWMutex
	closed bool
}

// use keeps the pins open until release. It must not be nested.
func (g *Group) use() (release func(), err error) {
	g.mu.RLock()
	if g.closed {
		g.mu.RUnlock()
		return nil, ErrClosed // every caller names the group
	}
	return g.mu.RUnlock, nil
}

// Open joins the group of an address, or creates it when there is none. The
// sizes in the options count for creation only.
//
// Errors: ErrOptions, ErrPermission, ErrNotSupported, ErrLayout, ErrService when
// the group belongs to another service, ErrMismatch when it has another steering
// or another length of connection IDs, ErrOccupied when sockets that are not the
// group's stand in its way, ErrBusy. Each message says what to do.
func Open(options Options) (*Group, error) {
	g, err := openOrCreate(options, nil)
	if err != nil {
		return nil, err
	}
	if err := g.checkAddress(); err != nil {
		return nil, errors.Join(fmt.Errorf("open group %s: %w", g.key, err), g.Close())
	}
	return g, nil
}

// Prepare makes the group of an address, and gives its folder and pins to a user,
// who can then run the server without any capability. It returns the folder. A group
// that exists is only given to the user; one that belongs to another service is
// refused. It needs the rights to create a group, and CAP_CHOWN.
func Prepare(options Options, owner Owner) (string, error) {
	g, err := openOrCreate(options, &owner)
	if err != nil {
		return "", err
	}
	return g.Path(), g.Close()
}

func openOrCreate(options Options, owner *Owner) (*Group, error) {
	o, k, err := options.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("open group: %w", err)
	}
	prefix, err := o.prefixLen()
	if err != nil {
		return nil, fmt.Errorf("open group: %w", err)
	}
	namespace, err := namespaceName()
	if err != nil {
		return nil, err
	}
	if o.Files != nil {
		if owner != nil {
			return nil, fmt.Errorf("prepare group: %w: Files is set, and a group without pins has no folder to give away", ErrOptions)
		}
		return openWithoutPins(o, k, namespace, prefix)
	}
	dir := filepath.Join(o.Root, namespace, k.folder())
	for range 3 {
		if !exists(dir) {
			if err := create(o, k, namespace, prefix, owner); err != nil && !errors.Is(err, fs.ErrExist) {
				return nil, err
			}
		}
		g, err := openExisting(dir, o.LoadBalancer)
		if err != nil {
			if !exists(dir) {
				continue
			}
			return nil, err
		}
		if err := g.adopt(o, prefix); err != nil {
			return nil, errors.Join(err, g.Close())
		}
		if owner != nil {
			if err := give(dir, *owner); err != nil {
				return nil, errors.Join(err, g.Close())
			}
		}
		return g, nil
	}
	return nil, fmt.Errorf("open group %s: %w: it was made and removed again while it was being opened", dir, ErrBusy)
}

func exists(dir string) bool {
	_, err := os.Lstat(dir)
	return err == nil || errors.Is(err, fs.ErrPermission)
}

// openWithoutPins joins the group that an earlier process passed, or makes one.
func openWithoutPins(o Options, k key, namespace string, prefix int) (*Group, error) {
	d, err := openDescriptors(o.Files, k)
	if errors.Is(err, fs.ErrNotExist) {
		if err := mayCreate(o, k); err != nil {
			return nil, err
		}
		d, err = makeDescriptors(o, k, namespace, prefix)
	}
	if err != nil {
		return nil, err
	}
	g, err := openHome(d, namespace, o.LoadBalancer)
	if err != nil {
		return nil, err
	}
	if g.key != k {
		return nil, errors.Join(damaged(d, "it says that its address is %s", g.key), g.Close())
	}
	if err := g.adopt(o, prefix); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// mayCreate refuses what cannot be, before anything is made.
func mayCreate(o Options, k key) error {
	if err := lacksCapabilities(); err != nil {
		return fmt.Errorf("create group: %w", err)
	}
	if _, err := k.deviceIndex(); err != nil {
		return fmt.Errorf("create group: %w", err)
	}
	return nil
}

func create(o Options, k key, namespace string, prefix int, owner *Owner) error {
	if err := mayCreate(o, k); err != nil {
		return err
	}
	parent, err := namespaceFolder(o.Root, namespace)
	if err != nil {
		return err
	}
	l, err := lock(parent)
	if err != nil {
		return err
	}
	defer func() { _ = l.Unlock() }()
	if exists(filepath.Join(parent, k.folder())) {
		return fs.ErrExist
	}
	if owner == nil {
		// What is refused leaves nothing behind. Prepare runs as another user than
		// the sockets' owner, and binds nothing.
		g := Group{key: k, service: o.Service, allowOverlap: o.AllowOverlap, log: logger(o)}
		if err := g.checkAddress(); err != nil {
			return fmt.Errorf("open group %s: %w", k, err)
		}
	}
	return buildFolder(parent, o, k, prefix, owner)
}

// adopt takes the caller's options over, and refuses a group that does not fit them.
func (g *Group) adopt(o Options, prefix int) error {
	if o.Service != g.service {
		who := "nobody"
		if occupants := g.generations(); len(occupants) > 0 {
			who = listed(occupants)
		}
		return fmt.Errorf("open group %s: %w: it belongs to service %q (sockets are held by %s) and this one is %q; choose "+
			"another address, set the same service name, or %s",
			g.key, ErrService, g.service, who, o.Service, g.home.remedy())
	}
	if s := Steering(g.table.Steering); s != o.Steering {
		return fmt.Errorf("open group %s: %w: its steering is %s and the options say %s; use the same steering, or %s",
			g.key, ErrMismatch, s, o.Steering, g.home.remedy())
	}
	if int(g.table.Prefix) != prefix {
		return fmt.Errorf("open group %s: %w: its connection IDs have prefixes of %d bytes and the options ask for %d; all "+
			"generations need the same length: keep the load balancer's server ID and nonce lengths, or %s",
			g.key, ErrMismatch, g.table.Prefix, prefix, g.home.remedy())
	}
	g.build = o.Build
	g.dissector = o.Dissector
	g.allowOverlap = o.AllowOverlap
	g.receiveBuffer = o.ReceiveBuffer
	g.log = logger(o)
	return nil
}

func logger(o Options) *slog.Logger {
	if o.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return o.Logger
}

// OpenPath opens an existing group by its folder, for tools. It may be the group of
// another network namespace; joining is then refused.
func OpenPath(path string) (*Group, error) {
	return openExisting(filepath.Clean(path), nil)
}

func openExisting(dir string, lb *connid.LoadBalancer) (*Group, error) {
	f, err := openFolder(dir)
	if err != nil {
		return nil, err
	}
	g, err := openHome(f, filepath.Base(filepath.Dir(dir)), lb)
	if err != nil {
		return nil, err
	}
	if replaced, err := f.replaced(); replaced || err != nil {
		// Some pins may be of the one, some of the other.
		if err := errors.Join(err, g.Close()); err != nil {
			return nil, fmt.Errorf("open group %s: %w", dir, err)
		}
		return openExisting(dir, lb)
	}
	if g.key.folder() != filepath.Base(dir) {
		return nil, errors.Join(damaged(f, "it says that its address is %s", g.key), g.Close())
	}
	return g, nil
}

// openHome opens a group whose home it owns.
func openHome(at home, namespace string, lb *connid.LoadBalancer) (*Group, error) {
	p, t, err := openPins(at)
	if err != nil {
		return nil, errors.Join(err, at.close())
	}
	g := &Group{
		home:      at,
		namespace: namespace,
		table:     t,
		pins:      p,
		service:   text(t.Service[:]),
		build:     build.ID(),
		log:       logger(Options{}),
	}
	unmapWith(g, t)
	refuse := func(err error) (*Group, error) { return nil, errors.Join(err, p.close(), at.close()) }
	network, address, device := text(t.Network[:]), text(t.Address[:]), text(t.Device[:])
	if g.key, err = parseKey(network, address, device); err != nil {
		return refuse(damaged(at, "it says that its address is %q %q %q", network, address, device))
	}
	if err := p.secrets.Lookup(uint32(0), &g.secrets); err != nil {
		return refuse(fmt.Errorf("open group %s: read secrets: %w", at, err))
	}
	if g.codec, err = newCodec(&g.secrets, lb); err != nil {
		return refuse(fmt.Errorf("open group %s: %w", at, err))
	}
	g.watch = newWatch(g)
	return g, nil
}

// Path is the group's folder, "" for a group without pins.
func (g *Group) Path() string {
	if f, ok := g.home.(*folder); ok {
		return f.dir
	}
	return ""
}

// Close releases the process's hold on the group. The group, its generations and
// its secrets stay. Generations of this Group must be closed before.
func (g *Group) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	g.mu.Unlock()
	g.watch.stop()
	if err := errors.Join(g.pins.close(), g.home.close()); err != nil {
		return fmt.Errorf("close group %s: %w", g.key, err)
	}
	return nil
}

// now is the clock of the table: CLOCK_MONOTONIC in nanoseconds, as the data plane's.
func now() uint64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return 0
	}
	return uint64(ts.Nano())
}

// wall turns a time of the table into wall-clock time.
func wall(t uint64) time.Time {
	if t == 0 {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(int64(t) - int64(now())))
}

// update runs a change of the table under the folder's lock, after the table has
// been mended.
func (g *Group) update(change func() error) error {
	release, err := g.use()
	if err != nil {
		return err
	}
	defer release()
	g.writer.Lock()
	defer g.writer.Unlock()
	l, err := g.home.lock()
	if err != nil {
		return err
	}
	step("lock")
	g.repair()
	step("repair")
	err = change()
	step("change")
	atomic.AddUint64(&g.table.Changes, 1)
	step("count change")
	g.notify()
	step("notify")
	return errors.Join(err, l.Unlock())
}

// live counts the sockets of a slot that the map holds.
func (g *Group) live(slot uint8) int {
	n := 0
	for w := range g.table.workersOf(slot) {
		if g.registered(slot, w) {
			n++
		}
	}
	return n
}

func (g *Group) registered(slot uint8, worker uint32) bool {
	var cookie uint64
	return g.pins.sockets.Lookup(uint32(slot)*g.table.workers+worker, &cookie) == nil
}

// owner is a worker of a generation.
type owner struct {
	generation uint32
	worker     int
}

// owners are the registered sockets, by their cookies; none of a group that is still to be
// made.
func (g *Group) owners() map[uint64]owner {
	owners := make(map[uint64]owner)
	if g.pins == nil {
		return owners
	}
	for s := range g.table.generations {
		if g.table.Info[s].Stage == bpf.StageFree {
			continue // its entries were taken out
		}
		for w := range g.table.workersOf(uint8(s)) {
			var cookie uint64
			if g.pins.sockets.Lookup(s*g.table.workers+w, &cookie) == nil {
				owners[cookie] = owner{g.table.Slots[s].Number, int(w)}
			}
		}
	}
	return owners
}

// alive reports whether a slot has a socket. A map that cannot be read proves no
// death.
func (g *Group) alive(slot uint8) bool {
	for w := range g.table.workersOf(slot) {
		var cookie uint64
		err := g.pins.sockets.Lookup(uint32(slot)*g.table.workers+w, &cookie)
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return true
		}
	}
	return false
}

// activeDied reports whether the active generation has no socket any more.
func (g *Group) activeDied() bool {
	release, err := g.use()
	if err != nil {
		return false
	}
	defer release()
	active := g.table.active()
	return active.number() != 0 && !g.alive(active.slot())
}

// repair mends what dead processes left. The caller holds the lock, so whoever was
// in the middle of a change is dead: a slot that is neither free nor a generation
// with a live socket in the order is taken out.
func (g *Group) repair() {
	g.stamp()
	slots, activated, sound := g.table.readOrder(g.table.active())
	var gone []uint8
	for i := range int(g.table.generations) {
		slot := uint8(i)
		placed := slices.Contains(slots, slot)
		free := g.table.Info[slot].Stage == bpf.StageFree
		joined := g.table.Info[slot].Stage == bpf.StageJoined
		if free && !placed || joined && placed && g.alive(slot) {
			continue
		}
		gone = append(gone, slot)
	}
	if len(gone) == 0 && sound {
		return
	}
	if !sound {
		g.log.Warn("the order of the generations was damaged; mended", "group", g.key.String())
	}
	old := g.table.active()
	for _, slot := range gone {
		slots, activated = without(slots, activated, slot)
	}
	g.publish(slots, activated)
	for _, slot := range gone {
		g.vacate(slot)
		step("mend")
		g.log.Info("generation is gone", "group", g.key.String(), "generation", g.table.Info[slot].Number)
	}
	if w := g.table.active(); w.number() != old.number() {
		g.log.Warn("the active generation died", "group", g.key.String(), "died", old.number(), "active", w.number())
	}
}

// publish makes an order true, and notes when who became active by it.
func (g *Group) publish(slots []uint8, activated int) {
	g.table.publish(slots, activated)
	g.stamp()
}

// stamp brings the times of the generations in line with the order. A writer that
// died between the two left that to the next one.
func (g *Group) stamp() {
	slots, activated := g.table.order()
	for i, slot := range slots[:activated] {
		info := &g.table.Info[slot]
		switch {
		case i == 0 && (info.Activated == 0 || info.Superseded != 0):
			info.Activated, info.Superseded, info.Deadline = now(), 0, 0
		case i > 0 && info.Superseded == 0:
			info.Superseded = now()
		}
	}
	step("note times")
}

// vacate empties a slot that is in no order.
func (g *Group) vacate(slot uint8) {
	for w := range g.table.workers {
		// An empty entry is what we want.
		_ = g.pins.sockets.Delete(uint32(slot)*g.table.workers + w)
		step("take socket out")
	}
	g.table.Info[slot].Stage = bpf.StageFree
}

// Activate makes a generation the one that new flows go to; the one that was active
// is draining from then on. Activating the active one changes nothing.
//
// Errors: ErrNotExist when no such generation holds sockets, ErrState when some of its
// workers are gone.
func (g *Group) Activate(number uint32) error {
	err := g.update(func() error { return g.activate(number) })
	if err != nil {
		return fmt.Errorf("activate generation %d of %s: %w", number, g.key, err)
	}
	return nil
}

func (g *Group) activate(number uint32) error {
	slot, ok := g.table.find(number)
	if !ok {
		return fmt.Errorf("generation %w in the group: it left, or its process died; instar show lists those that are there", ErrNotExist)
	}
	old := g.table.active()
	if old.number() == number {
		return nil
	}
	if live, want := g.live(slot), int(g.table.Slots[slot].Workers); live != want {
		return fmt.Errorf("%w: %d of its %d workers live; a closed socket does not come back: start another generation", ErrState, live, want)
	}
	slots, activated := g.table.order()
	g.publish(promoted(slots, activated, slot))
	g.log.Info("generation is active", "group", g.key.String(), "generation", number, "before", old.number())
	return nil
}

// Rollback makes the generation active that was so before the active one, and
// returns its number. Calling it again swaps the two back.
//
// Errors: ErrState when no earlier generation lives, or some of its workers are gone.
func (g *Group) Rollback() (number uint32, err error) {
	err = g.update(func() error {
		slots, activated := g.table.order()
		if activated < 2 {
			return fmt.Errorf("%w: no generation that was active before still holds sockets", ErrState)
		}
		number = g.table.Slots[slots[1]].Number
		return g.activate(number)
	})
	if err != nil {
		return 0, fmt.Errorf("roll back %s: %w", g.key, err)
	}
	return number, nil
}

// SetDeadline sets when a draining generation has to have left; the zero time takes
// the deadline away. The process that owns the generation acts on it.
//
// Errors: ErrNotExist, ErrState when the generation is active.
func (g *Group) SetDeadline(number uint32, deadline time.Time) error {
	err := g.update(func() error {
		slot, err := g.leaving(number)
		if err != nil {
			return err
		}
		g.table.Info[slot].Deadline = 0
		if !deadline.IsZero() {
			g.table.Info[slot].Deadline = max(1, uint64(int64(now())+int64(time.Until(deadline))))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("set deadline of generation %d of %s: %w", number, g.key, err)
	}
	return nil
}

// Evict takes a generation's sockets out of the map at once, for a process that does
// not answer. Its flows are orphans from then on: their packets go to the active
// generation. The sockets stay open in their process until it closes them or ends.
//
// Errors: ErrNotExist, ErrState when the generation is active.
func (g *Group) Evict(number uint32) error {
	err := g.update(func() error {
		slot, err := g.leaving(number)
		if err != nil {
			return err
		}
		g.leave(slot)
		return nil
	})
	if err != nil {
		return fmt.Errorf("evict generation %d of %s: %w", number, g.key, err)
	}
	return nil
}

// leaving finds a generation that is not the active one.
func (g *Group) leaving(number uint32) (uint8, error) {
	slot, ok := g.table.find(number)
	if !ok {
		return 0, fmt.Errorf("generation %w in the group (any more)", ErrNotExist)
	}
	if g.table.active().number() == number {
		return 0, fmt.Errorf("%w: it is active; activate another generation first, or stop its server", ErrState)
	}
	return slot, nil
}

// leave takes a slot out of the order and then out of the socket map.
func (g *Group) leave(slot uint8) {
	slots, activated := g.table.order()
	g.publish(without(slots, activated, slot))
	g.vacate(slot)
}

// Repair mends what dead processes left, as every change does first: generations
// without a socket are gone, and when the active one died the one that was active
// before it is active again.
func (g *Group) Repair() error {
	if err := g.update(func() error { return nil }); err != nil {
		return fmt.Errorf("repair %s: %w", g.key, err)
	}
	return nil
}
