// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/internal/bpffs"
	"instar/internal/capset"
	"instar/internal/kernel"
)

// Names of the pins in a group's folder.
const (
	pinSockets  = "sockets"
	pinControl  = "control"
	pinSecrets  = "secrets"
	pinVerdicts = "verdicts"
	pinFlows    = "flows"
	pinProgram  = "program"

	// groupPrefix starts the name of every group, asidePrefix that of a folder that is
	// being built or removed.
	groupPrefix = "udp"
	asidePrefix = "new-"
)

// oldestKernel has what the data plane needs: global functions, mapped arrays,
// bounded loops and the jiffies helper; it is the oldest one that is tested.
var oldestKernel = kernel.Version{Major: 5, Minor: 10}

// ownMemlock accounts the memory of maps and programs to the control group: before
// it, RLIMIT_MEMLOCK bounded it.
var ownMemlock = kernel.Version{Major: 5, Minor: 11}

// pins are the open objects of a group.
type pins struct {
	sockets, control, secrets, verdicts *ebpf.Map
	// flows is nil where the steering remembers none.
	flows   *ebpf.Map
	program *ebpf.Program
}

// maps lists the maps by the names of their pins.
func (p *pins) maps() map[string]*ebpf.Map {
	m := map[string]*ebpf.Map{
		pinSockets: p.sockets, pinControl: p.control, pinSecrets: p.secrets, pinVerdicts: p.verdicts,
	}
	if p.flows != nil {
		m[pinFlows] = p.flows
	}
	return m
}

func (p *pins) close() error {
	var errs []error
	for _, m := range p.maps() {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	if p.program != nil {
		errs = append(errs, p.program.Close())
	}
	return errors.Join(errs...)
}

// openPins opens what a group's folder holds. It reads the layout version before
// it looks at anything else.
func openPins(dir string) (p *pins, t table, err error) {
	p = &pins{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
			p = nil
		}
	}()
	open := func(name string) (*ebpf.Map, error) {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		return m, explainPin(dir, name, err)
	}
	if p.control, err = open(pinControl); err != nil {
		return p, t, err
	}
	step("open control map")
	if t, err = openTable(dir, p.control); err != nil {
		return p, t, err
	}
	if p.sockets, err = open(pinSockets); err == nil {
		if p.secrets, err = open(pinSecrets); err == nil {
			p.verdicts, err = open(pinVerdicts)
		}
	}
	if err == nil {
		t.generations, t.workers = t.MaxGenerations, t.MaxWorkers
		err = p.check(dir, t)
	}
	if err == nil && Steering(t.Steering) == SteeringQUIC {
		p.flows, err = open(pinFlows)
	}
	if err != nil {
		t.unmap()
		return p, t, err
	}
	p.program, err = ebpf.LoadPinnedProgram(filepath.Join(dir, pinProgram), nil)
	if err = explainPin(dir, pinProgram, err); err != nil {
		t.unmap()
	}
	return p, t, err
}

// check refuses pins that do not belong together.
func (p *pins) check(dir string, t table) error {
	switch _, known := steeringNames[Steering(t.Steering)]; {
	case t.generations < 2 || t.generations > LimitGenerations || t.workers < 1 || t.workers > LimitWorkers:
		return damaged(dir, "it says %d generations of %d workers", t.generations, t.workers)
	case !known:
		return damaged(dir, "it says %v", Steering(t.Steering))
	case p.sockets.Type() != ebpf.ReusePortSockArray || p.sockets.MaxEntries() != t.generations*t.workers:
		return damaged(dir, "pin %q is a %v of %d entries", pinSockets, p.sockets.Type(), p.sockets.MaxEntries())
	}
	return nil
}

func damaged(dir, format string, args ...any) error {
	return fmt.Errorf("open group %s: %w: it is damaged: %s; stop its servers and run: instar forget %s",
		dir, ErrLayout, fmt.Sprintf(format, args...), dir)
}

func explainPin(dir, name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("open group %s: pin %q is missing: %w; "+
			"if no server uses the group, remove what is left with: instar forget %s", dir, name, ErrNotExist, dir)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("open group %s: pin %q: %w for uid %d; "+
			"the group's owner is uid %s: run as that user, or give the group to this one with: instar prepare --owner USER --service SERVICE ADDRESS",
			dir, name, ErrPermission, os.Geteuid(), ownerOf(dir))
	case err != nil:
		return fmt.Errorf("open group %s: pin %q: %w", dir, name, err)
	}
	return nil
}

func ownerOf(path string) string {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return "unknown"
	}
	return fmt.Sprint(st.Uid)
}

// openTable maps the control map after it has seen that the layout is known.
func openTable(dir string, m *ebpf.Map) (table, error) {
	page, err := unix.Mmap(m.FD(), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return table{}, fmt.Errorf("open group %s: map control map into memory: %w", dir, err)
	}
	layout := uint32(page[0]) | uint32(page[1])<<8 | uint32(page[2])<<16 | uint32(page[3])<<24
	if err := unix.Munmap(page); err != nil {
		return table{}, fmt.Errorf("open group %s: unmap control map: %w", dir, err)
	}
	if layout != bpf.Layout {
		return table{}, fmt.Errorf("open group %s: %w: it has layout %d and this build knows %d; "+
			"use the build that made the group, or stop its servers and run: instar forget %s",
			dir, ErrLayout, layout, bpf.Layout, dir)
	}
	t, err := mapTable(m.FD())
	if err != nil {
		return table{}, fmt.Errorf("open group %s: %w", dir, err)
	}
	return t, nil
}

// checkRoot refuses a root that is not on a bpffs, or would not be.
func checkRoot(root string) error {
	at := filepath.Clean(root)
	on, err := bpffs.IsBPFFS(at)
	for errors.Is(err, fs.ErrNotExist) && at != filepath.Dir(at) {
		at = filepath.Dir(at)
		on, err = bpffs.IsBPFFS(at)
	}
	if err == nil && !on {
		return fmt.Errorf("%w: %s is not on a bpffs; mount one with: mount -t bpf bpf %s",
			ErrNoBPFFS, root, mountPointFor(root))
	}
	if err != nil {
		return fmt.Errorf("look at %s: %w", root, err)
	}
	return nil
}

// namespaceFolder makes the folder of a network namespace below the root.
func namespaceFolder(root, namespace string) (string, error) {
	if err := checkRoot(root); err != nil {
		return "", fmt.Errorf("create group: %w", err)
	}
	dir := filepath.Join(root, namespace)
	for _, d := range []string{root, dir} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			if errors.Is(err, fs.ErrPermission) {
				return "", fmt.Errorf("create group: make folder %s: %w for uid %d", d, ErrPermission, os.Geteuid())
			}
			return "", fmt.Errorf("create group: make folder %s: %w", d, err)
		}
		// Whoever owns the folder can put another group in the place of ours.
		var st unix.Stat_t
		if err := unix.Stat(d, &st); err != nil {
			return "", fmt.Errorf("create group: %w", &fs.PathError{Op: "stat", Path: d, Err: err})
		}
		if st.Uid != 0 && int(st.Uid) != os.Geteuid() {
			return "", fmt.Errorf("create group: %w: folder %s belongs to uid %d, who could replace the group; "+
				"move it away, or take it over with: chown root:root %s", ErrPermission, d, st.Uid, d)
		}
	}
	return dir, nil
}

// mountPointFor suggests where to mount a bpffs for a root: the usual place when that
// has the root, and else the root itself. A mount above it would hide what is there.
func mountPointFor(root string) string {
	const usual = "/sys/fs/bpf"
	root = filepath.Clean(root)
	if root == usual || strings.HasPrefix(root, usual+"/") {
		return usual
	}
	return root
}

// build creates the objects of a group, and pins them in a folder aside. The
// caller publishes the folder by renaming it. The namespace's folder is locked.
func build(dir string, o Options, k key, prefix int, owner *Owner) (err error) {
	if err := removeAside(dir); err != nil {
		return fmt.Errorf("create group: %w", err)
	}
	p, err := load(o, prefix)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	step("load")
	if err := initialise(p, o, k, prefix); err != nil {
		return err
	}
	step("initialise")
	aside := asideName(dir)
	if err := os.Mkdir(aside, 0o700); err != nil {
		return fmt.Errorf("create group: make folder: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removePins(aside))
		}
	}()
	step("make folder aside")
	for name, m := range p.maps() {
		if err := m.Pin(filepath.Join(aside, name)); err != nil {
			return fmt.Errorf("create group: pin map %s: %w", name, err)
		}
		step("pin map")
	}
	if err := p.program.Pin(filepath.Join(aside, pinProgram)); err != nil {
		return fmt.Errorf("create group: pin program: %w", err)
	}
	step("pin program")
	if owner != nil {
		if err := give(aside, *owner); err != nil {
			return err
		}
	}
	final := filepath.Join(dir, k.folder())
	if err := bpffs.RenameNoReplace(aside, final); err != nil {
		return fmt.Errorf("create group: publish %s: %w", final, err)
	}
	step("publish folder")
	return nil
}

// asideName is where this process builds and removes groups.
func asideName(dir string) string {
	return filepath.Join(dir, fmt.Sprint(asidePrefix, os.Getpid()))
}

// removeAside removes what a crash left. The namespace's folder is locked, so whoever
// was building or removing there is dead.
func removeAside(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), asidePrefix) {
			if err := removePins(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("remove what a crash left: %w", err)
			}
		}
	}
	return nil
}

// give makes a user the owner of a group's folder and pins. The folder comes last, so
// that whoever owns it has had all of it.
func give(dir string, owner Owner) error {
	from, _, err := owners(dir)
	if err != nil {
		return fmt.Errorf("give group to uid %d: %w", owner.UID, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("give group to uid %d: %w", owner.UID, err)
	}
	for _, e := range entries {
		if err := givePin(filepath.Join(dir, e.Name()), from, owner); err != nil {
			return fmt.Errorf("give group to uid %d: %w", owner.UID, err)
		}
		step("give pin")
	}
	if err := os.Chown(dir, owner.UID, owner.GID); err != nil {
		return fmt.Errorf("give group to uid %d: %w", owner.UID, err)
	}
	step("give folder")
	return nil
}

// givePin gives away what the folder's owner has. He may have put links there, to what
// is not his.
func givePin(path string, from int, owner Owner) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if uid := int(st.Uid); uid != from && uid != owner.UID {
		return fmt.Errorf("%w: %s belongs to uid %d and the group to uid %d; remove that file", ErrPermission, path, uid, from)
	}
	if err := unix.Fchownat(fd, "", owner.UID, owner.GID, unix.AT_EMPTY_PATH); err != nil {
		return &fs.PathError{Op: "chown", Path: path, Err: err}
	}
	return nil
}

// removePins removes a group's folder, with whatever its owner put there. Objects live
// on in the processes that have them open.
func removePins(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
		step("remove pin")
	}
	return os.Remove(dir)
}

// load creates the maps and loads the program.
func load(o Options, prefix int) (*pins, error) {
	spec, name, err := bpf.Spec(bpf.Config{
		Steering:       uint32(o.Steering),
		MaxGenerations: o.MaxGenerations,
		MaxWorkers:     o.Workers,
		FlowEntries:    o.FlowEntries,
		Prefix:         prefix,
	})
	if err != nil {
		return nil, fmt.Errorf("create group: %w", err)
	}
	// Raises the limit only on kernels that need it (before ownMemlock). Where that
	// fails, loading says so.
	_ = rlimit.RemoveMemlock()
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, fmt.Errorf("create group: %w", explainLoad(err))
	}
	p := &pins{
		sockets:  c.DetachMap(bpf.MapSockets),
		control:  c.DetachMap(bpf.MapControl),
		secrets:  c.DetachMap(bpf.MapSecrets),
		verdicts: c.DetachMap(bpf.MapVerdicts),
		program:  c.DetachProgram(name),
	}
	if spec.Maps[bpf.MapFlows] != nil {
		p.flows = c.DetachMap(bpf.MapFlows)
	}
	c.Close()
	return p, nil
}

// explainLoad finds out why the kernel refused the data plane. It tries one
// thing at a time, since the kernel answers most of them with a bare EPERM.
func explainLoad(err error) error {
	if e := lacksCapabilities(); e != nil {
		return e
	}
	if v, e := kernel.Current(); e == nil && !v.AtLeast(oldestKernel) {
		return fmt.Errorf("%w: Linux %v is running and %v is the oldest that can (%w)",
			ErrNotSupported, v, oldestKernel, answer(err))
	}
	if errors.Is(err, unix.EPERM) {
		if e := features.HaveMapType(ebpf.Array); e != nil {
			return fmt.Errorf("%w: the capabilities are there but bpf(2) is refused (%w); a seccomp filter "+
				"(container runtimes have one), a security module, or a user namespace without a BPF token forbids it: "+
				"allow bpf(2) there, or make the group outside with: instar prepare --owner USER --service SERVICE ADDRESS",
				ErrPermission, answer(e))
		}
		cure := "a security module forbids networking programs: allow them"
		if v, e := kernel.Current(); e != nil || !v.AtLeast(ownMemlock) {
			cure = "raise RLIMIT_MEMLOCK, or look for a security module that forbids networking programs"
		}
		return fmt.Errorf("%w: maps can be created but not the program (%w); %s", ErrPermission, answer(err), cure)
	}
	return fmt.Errorf("load data plane: %w", err)
}

// answer is what the kernel said, without the library's advice and the verifier's
// log: where a right is missing both lead astray.
func answer(err error) error {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return err
}

// lacksCapabilities names what this process lacks for making a group.
func lacksCapabilities() error {
	set, err := capset.Effective()
	if err != nil {
		set = ^capset.Set(0) // the kernel will say
	}
	missing := set.Missing(capset.BPF, capset.NetAdmin, capset.Perfmon)
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%w: this process lacks %s; add them (a unit's AmbientCapabilities=, a container's "+
		"cap-add), or make the group beforehand as root with: instar prepare --owner USER --service SERVICE ADDRESS",
		ErrPermission, capset.Names(missing))
}

// initialise fills the maps of a new group before anybody can see them.
func initialise(p *pins, o Options, k key, prefix int) error {
	t, err := mapTable(p.control.FD())
	if err != nil {
		return fmt.Errorf("create group: %w", err)
	}
	defer t.unmap()
	t.Layout = bpf.Layout
	t.Steering = uint32(o.Steering)
	t.MaxGenerations = uint32(o.MaxGenerations)
	t.MaxWorkers = uint32(o.Workers)
	t.FlowEntries = uint32(o.FlowEntries)
	t.Prefix = uint32(prefix)
	t.NextNumber = 1
	setText(t.Service[:], o.Service)
	setText(t.Network[:], k.network)
	setText(t.Address[:], k.addr.String())
	setText(t.Device[:], k.device)
	setText(t.Program[:], bpf.Build(uint32(o.Steering)))

	var secrets bpf.Secrets
	if _, err := rand.Read(secrets.Master[:]); err != nil {
		return fmt.Errorf("create group: make secrets: %w", err)
	}
	if err := deriveKeys(&secrets); err != nil {
		return fmt.Errorf("create group: %w", err)
	}
	if err := p.secrets.Put(uint32(0), &secrets); err != nil {
		return fmt.Errorf("create group: store secrets: %w", err)
	}
	return nil
}

// lock takes a folder's lock for a transaction.
func lock(dir string) (*bpffs.Lock, error) {
	ctx, cancel := context.WithTimeout(context.Background(), lockWait)
	defer cancel()
	l, err := bpffs.Acquire(ctx, dir, true)
	var busy *bpffs.BusyError
	switch {
	case errors.As(err, &busy):
		return nil, fmt.Errorf("%w: %w", ErrBusy, err)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("group %s: %w (any more)", dir, ErrNotExist)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("lock %s: %w for uid %d: the folder belongs to uid %s", dir, ErrPermission, os.Geteuid(), ownerOf(dir))
	}
	return l, err
}
