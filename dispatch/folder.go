// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/internal/bpffs"
	"instar/internal/capset"
	"instar/internal/kernel"
)

// asidePrefix starts the name of a folder that is being built or removed.
const asidePrefix = "new-"

// isGroup reports whether a folder's name is that of a group.
func isGroup(name string) bool {
	return strings.HasPrefix(name, udp) || strings.HasPrefix(name, tcp)
}

// folder is a group's folder of pins.
type folder struct {
	dir string
	// inode tells the folder from one that was made in its place.
	inode uint64
}

func openFolder(dir string) (*folder, error) {
	at, err := inode(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("group %s: %w", dir, ErrNotExist)
	}
	if err != nil {
		return nil, fmt.Errorf("open group %s: %w", dir, err)
	}
	return &folder{dir, at}, nil
}

func inode(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Ino, nil
}

// replaced reports whether another folder is in the place of this one, or none.
func (f *folder) replaced() (bool, error) {
	at, err := inode(f.dir)
	return at != f.inode, err
}

func (f *folder) String() string { return f.dir }
func (f *folder) path() string   { return f.dir }
func (f *folder) remedy() string { return "stop its servers and run: instar forget " + f.dir }
func (f *folder) close() error   { return nil }

func (f *folder) owner() (int, error) {
	uid, _, err := owners(f.dir)
	return uid, err
}

func (f *folder) lock() (*bpffs.Lock, error) {
	l, err := lock(f.dir)
	if err != nil {
		return nil, err
	}
	if replaced, err := f.replaced(); replaced || err != nil {
		return nil, errors.Join(fmt.Errorf("the group was removed and made anew since it was opened; open it again: %w", ErrNotExist), err, l.Unlock())
	}
	return l, nil
}

func (f *folder) openMap(name string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(f.dir, name), nil)
	return m, explainPin(f.dir, name, err)
}

func (f *folder) openProgram() (*ebpf.Program, error) {
	p, err := ebpf.LoadPinnedProgram(filepath.Join(f.dir, pinProgram), nil)
	return p, explainPin(f.dir, pinProgram, err)
}

// refresh opens the program that is pinned now: another process may have replaced it
// since this one opened the group.
func (f *folder) refresh(*ebpf.Program) (*ebpf.Program, error) {
	p, err := ebpf.LoadPinnedProgram(filepath.Join(f.dir, pinProgram), nil)
	if err != nil {
		return nil, fmt.Errorf("open program: %w", err)
	}
	return p, nil
}

func (f *folder) current(*ebpf.Program) (bool, error) { return true, nil } // after refresh
func (f *folder) attached(*ebpf.Program) error        { return nil }

// replaceProgram pins the program in the place of the one that is there.
func (f *folder) replaceProgram(p *ebpf.Program, attach func() error) (err error) {
	aside := filepath.Join(f.dir, pinProgram+"-new")
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove what a crash left: %w", err)
	}
	if err := p.Pin(aside); err != nil {
		return fmt.Errorf("pin program: %w", err)
	}
	step("pin program aside")
	if err := chownLike(aside, f.dir); err != nil {
		return errors.Join(err, os.Remove(aside))
	}
	if err := attach(); err != nil {
		return errors.Join(err, os.Remove(aside))
	}
	// From here on every packet runs the new program; the pin is for those who join
	// an address that has no socket left.
	if err := os.Rename(aside, filepath.Join(f.dir, pinProgram)); err != nil {
		return fmt.Errorf("publish program: %w", err)
	}
	step("publish program")
	return nil
}

func explainPin(dir, name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("open group %s: pin %q is missing: %w; "+
			"if no server uses the group, remove what is left with: instar forget %s", dir, name, ErrNotExist, dir)
	case errors.Is(err, fs.ErrPermission) && ownerOf(dir) == fmt.Sprint(os.Geteuid()) && bpfIsPrivileged():
		return fmt.Errorf("open group %s: pin %q: %w: kernel.unprivileged_bpf_disabled is set, which before Linux %v keeps "+
			"processes without CAP_BPF from all maps; set it to 0, or add CAP_BPF (a unit's AmbientCapabilities=)",
			dir, name, ErrPermission, ownMaps)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("open group %s: pin %q: %w for uid %d; "+
			"the group's owner is uid %s: run as that user, or give the group to this one with: instar prepare --owner USER --service SERVICE ADDRESS",
			dir, name, ErrPermission, os.Geteuid(), ownerOf(dir))
	case err != nil:
		return fmt.Errorf("open group %s: pin %q: %w", dir, name, err)
	}
	return nil
}

// ownMaps lets unprivileged processes use maps that they may open, whatever
// kernel.unprivileged_bpf_disabled is.
var ownMaps = kernel.Version{Major: 5, Minor: 19}

// bpfIsPrivileged says whether the kernel refuses bpf(2) to this process, although the
// group may be its own.
func bpfIsPrivileged() bool {
	if v, err := kernel.Current(); err != nil || v.AtLeast(ownMaps) {
		return false
	}
	set, err := capset.Effective()
	if err != nil || set.Has(capset.BPF) || set.Has(capset.SysAdmin) {
		return false
	}
	setting, err := os.ReadFile("/proc/sys/kernel/unprivileged_bpf_disabled")
	return err == nil && strings.TrimSpace(string(setting)) != "0"
}

func ownerOf(path string) string {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return "unknown"
	}
	return fmt.Sprint(st.Uid)
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

// buildFolder creates the objects of a group, and pins them in a folder aside. The
// caller publishes the folder by renaming it. The namespace's folder is locked.
func buildFolder(dir string, o Options, k key, prefix int, owner *Owner) (err error) {
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
