// SPDX-License-Identifier: Apache-2.0

package pidfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// owner writes the file and does with it what the test says.
var owner = testutil.NewProgram("owner", func(c *testutil.Conversation) error {
	f, err := Write(c.Args[0], Options{Replace: len(c.Args) > 1})
	if err != nil {
		c.Send("%v", err)
		return nil
	}
	c.Send("ok")
	for {
		line, ok := c.Recv()
		if !ok {
			return nil
		}
		switch line {
		case "rewrite":
			err = f.Rewrite()
		case "remove":
			err = f.Remove()
		case "close":
			err = f.Close()
		default:
			err = errors.New("what?")
		}
		if err != nil {
			c.Send("%v", err)
			continue
		}
		c.Send("ok")
	}
})

func startOwner(t *testing.T, args ...string) *testutil.Process {
	t.Helper()
	p := owner.Start(t, testutil.Options{Args: args})
	p.Expect("ok")
	return p
}

func write(t *testing.T, path string, o Options) *File {
	t.Helper()
	f, err := Write(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func put(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// check compares what is at the path, and that nothing is beside it.
func check(t *testing.T, path string, pid int, owned bool) {
	t.Helper()
	if got, o, err := Read(path); got != pid || o != owned || err != nil {
		t.Errorf("%s has %d, owned %t, %v, want %d, %t", path, got, o, err, pid, owned)
	}
	checkFolder(t, filepath.Dir(path), filepath.Base(path))
}

func checkFolder(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if !slices.Equal(names, want) {
		t.Errorf("the folder has %q, want %q", names, want)
	}
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestWriteAndRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	f := write(t, path, Options{})
	check(t, path, os.Getpid(), true)
	data, err := os.ReadFile(path)
	if want := strconv.Itoa(os.Getpid()) + "\n"; err != nil || string(data) != want {
		t.Errorf("the file has %q, %v, want %q", data, err, want)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o644 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if f.Path() != path {
		t.Errorf("path %q", f.Path())
	}
	// Nothing to do.
	before := inode(t, path)
	if err := f.Rewrite(); err != nil || inode(t, path) != before {
		t.Errorf("rewrite of our own: %v", err)
	}
	for range 2 {
		if err := f.Remove(); err != nil {
			t.Error(err)
		}
	}
	checkFolder(t, filepath.Dir(path))
	if err := f.Rewrite(); !errors.Is(err, os.ErrClosed) || !strings.Contains(err.Error(), path) {
		t.Errorf("rewrite after remove: %v", err)
	}
	// Again, and not removed this time.
	f = write(t, path, Options{})
	for range 2 {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := f.Remove(); err != nil {
		t.Error(err)
	}
	check(t, path, os.Getpid(), false)
}

func TestRelativePath(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	f := write(t, "app.pid", Options{})
	t.Chdir("/")
	if err := f.Remove(); err != nil {
		t.Error(err)
	}
	checkFolder(t, dir)
}

func TestLivingOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	p := startOwner(t, path)
	check(t, path, p.PID, true)
	before := inode(t, path)
	_, err := Write(path, Options{})
	var inUse *InUseError
	if !errors.As(err, &inUse) || inUse.PID != p.PID || inUse.Path != path {
		t.Fatalf("%v, want an *InUseError of process %d", err, p.PID)
	}
	if want := fmt.Sprintf("write PID file %s: process %d owns it and lives; ", path, p.PID); !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	if inode(t, path) != before {
		t.Error("the file is another one")
	}
	check(t, path, p.PID, true)
	// A process that dies leaves a stale file.
	p.Kill()
	check(t, path, p.PID, false)
	write(t, path, Options{})
	check(t, path, os.Getpid(), true)
}

// The number of a stale file may be that of another process by now.
func TestStaleNumberLives(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	put(t, path, strconv.Itoa(os.Getppid())+"\n")
	check(t, path, os.Getppid(), false)
	write(t, path, Options{})
	check(t, path, os.Getpid(), true)
}

func TestUpgrade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	first := startOwner(t, path)
	second := startOwner(t, path, "replace")
	check(t, path, second.PID, true)
	// The predecessor leaves the successor's file alone.
	if got := first.Ask("remove"); got != "ok" {
		t.Error(got)
	}
	check(t, path, second.PID, true)
	// A third one, and it is rolled back.
	third := startOwner(t, path, "replace")
	check(t, path, third.PID, true)
	if got := second.Ask("rewrite"); got != "ok" {
		t.Error(got)
	}
	check(t, path, second.PID, true)
	if got := third.Ask("remove"); got != "ok" {
		t.Error(got)
	}
	check(t, path, second.PID, true)
	// One that dies before it is taken back leaves a stale one.
	fourth := startOwner(t, path, "replace")
	fourth.Kill()
	check(t, path, fourth.PID, false)
	if got := second.Ask("rewrite"); got != "ok" {
		t.Error(got)
	}
	check(t, path, second.PID, true)
	// Somebody removed it.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if got := second.Ask("rewrite"); got != "ok" {
		t.Error(got)
	}
	check(t, path, second.PID, true)
	if got := second.Ask("remove"); got != "ok" {
		t.Error(got)
	}
	checkFolder(t, filepath.Dir(path))
}

// A successor may be in the middle of its replacement when the predecessor leaves.
func TestRemoveWaitsForSuccessor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	f := write(t, path, Options{})
	looking, err := open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := lock(looking, unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	removed := make(chan error)
	go func() { removed <- f.Remove() }()
	// The successor's rename, while it holds the lock.
	put(t, path+".new", "1\n")
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if err := unlockAndClose(looking); err != nil {
		t.Fatal(err)
	}
	if err := <-removed; err != nil {
		t.Error(err)
	}
	check(t, path, 1, false)
}

// A lock that somebody holds for good does not hold Remove up.
func TestRemoveOfLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	f := write(t, path, Options{})
	other, err := open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := lock(other, unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	if err := f.Remove(); err == nil || !strings.Contains(err.Error(), path+": another process holds a lock") {
		t.Errorf("%v", err)
	}
	if err := unlockAndClose(other); err != nil {
		t.Fatal(err)
	}
	check(t, path, os.Getpid(), false)
}

// Of many that start at once exactly one owns the file, be there none or a stale
// one before.
func TestStartAtOnce(t *testing.T) {
	for _, stale := range []bool{false, true} {
		for i := range 6 {
			t.Run(fmt.Sprintf("stale=%t/%d", stale, i), func(t *testing.T) {
				t.Parallel()
				startAtOnce(t, stale)
			})
		}
	}
}

func startAtOnce(t *testing.T, stale bool) {
	path := filepath.Join(t.TempDir(), "app.pid")
	if stale {
		put(t, path, "1\n")
	}
	var (
		wg    sync.WaitGroup
		files [8]*File
		errs  [8]error
	)
	start := make(chan struct{})
	for i := range files {
		wg.Go(func() {
			<-start
			files[i], errs[i] = Write(path, Options{})
		})
	}
	close(start)
	wg.Wait()
	owners := 0
	for i, f := range files {
		var inUse *InUseError
		switch {
		case f != nil:
			owners++
			if ours, err := isAt(f.f, path); err != nil || !ours {
				t.Errorf("an owner's file is not at the path: %v", err)
			}
		case !errors.As(errs[i], &inUse) || inUse.PID != os.Getpid():
			t.Errorf("%v, want an *InUseError of process %d", errs[i], os.Getpid())
		}
	}
	if owners != 1 {
		t.Errorf("%d owners", owners)
	}
	check(t, path, os.Getpid(), true)
	for _, f := range files {
		if f != nil {
			if err := f.Remove(); err != nil {
				t.Error(err)
			}
		}
	}
}

// Between the look at a stale file and its lock somebody else may have started.
func TestReplacedMeanwhile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	put(t, path, "1\n")
	stale, err := open(path)
	if err != nil {
		t.Fatal(err)
	}
	p := startOwner(t, path)
	temp := path + ".new"
	put(t, temp, "2\n")
	for _, living := range []bool{false, true} {
		if _, err := replaceOpen(stale, temp, path, living); !errors.Is(err, errChanged) {
			t.Errorf("living %t: %v, want %v", living, err, errChanged)
		}
	}
	if err := errors.Join(os.Remove(temp), unlockAndClose(stale)); err != nil {
		t.Fatal(err)
	}
	check(t, path, p.PID, true)
}

// Predecessors leave while successors come: the last successor's file stays.
func TestRemoveWhileReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	f := write(t, path, Options{})
	for range 100 {
		var wg sync.WaitGroup
		old := f
		wg.Go(func() {
			if err := old.Remove(); err != nil {
				t.Error(err)
			}
		})
		var err error
		f, err = Write(path, Options{Replace: true})
		wg.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if ours, err := isAt(f.f, path); err != nil || !ours {
			t.Fatalf("the successor's file is gone: %v", err)
		}
	}
	if err := f.Remove(); err != nil {
		t.Fatal(err)
	}
	checkFolder(t, filepath.Dir(path))
}

func TestForeignFiles(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		content string
		refused bool
	}{
		{"", false},
		{"\n", false},
		{" 17 \n", false},
		{"17", false},
		{"root:x:0:0:\n", true},
		{"17 18\n", true},
		{"17\n18\n", true},
		{"-17\n", true},
		{"0\n", true},
		{"+17\n", true},
		{"2147483648\n", true},
		{"17" + strings.Repeat(" ", maxSize), true},
		{strings.Repeat(" ", maxSize+1), true},
	} {
		path := filepath.Join(dir, "app.pid")
		put(t, path, tc.content)
		f, err := Write(path, Options{Replace: true})
		if tc.refused {
			if err == nil || !strings.Contains(err.Error(), path+" holds something else") {
				t.Errorf("%q: %v", tc.content, err)
			}
			if _, _, err := Read(path); err == nil || !strings.Contains(err.Error(), "holds something else") {
				t.Errorf("read %q: %v", tc.content, err)
			}
			if data, err := os.ReadFile(path); err != nil || string(data) != tc.content {
				t.Errorf("%q became %q, %v", tc.content, data, err)
			}
		} else if err != nil {
			t.Errorf("%q: %v", tc.content, err)
		}
		if f != nil {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
		checkFolder(t, dir, "app.pid")
	}
	put(t, filepath.Join(dir, "app.pid"), "")
	if _, _, err := Read(filepath.Join(dir, "app.pid")); err == nil || !strings.Contains(err.Error(), "it is empty") {
		t.Errorf("read an empty file: %v", err)
	}
}

func TestOtherThings(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	if err := os.Mkdir(path("folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	put(t, path("target"), "17\n")
	if err := os.Symlink("target", path("link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(path("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		path string
		is   error // nil: any
		want string
	}{
		{"", nil, "the path is empty"},
		{path("folder"), nil, "no regular file; remove it"},
		{path("link"), nil, "symbolic link; name its target"},
		{path("fifo"), nil, "no regular file"},
		{path("none/app.pid"), fs.ErrNotExist, "; create the folder"},
		{path("target/app.pid"), unix.ENOTDIR, "target"},
		{path(strings.Repeat("x", 300)), unix.ENAMETOOLONG, "xxx"},
		{"/proc/app.pid", nil, "/proc/app.pid"},
	} {
		f, err := Write(tc.path, Options{Replace: true})
		if f != nil || err == nil || tc.is != nil && !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %v, %q", tc.path, err, tc.is, tc.want)
		}
	}
	checkFolder(t, dir, "fifo", "folder", "link", "target")
	if _, _, err := Read(path("none")); !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(err.Error(), "read PID file: ") {
		t.Errorf("read none: %v", err)
	}
}

func TestNoRights(t *testing.T) {
	testutil.NeedRoot(t)
	dir := t.TempDir()
	for d := dir; d != filepath.Dir(filepath.Dir(dir)); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "app.pid")
	ask := func() string {
		return owner.Start(t, testutil.Options{Args: []string{path}, As: testutil.Nobody()}).Recv()
	}
	if got := ask(); !strings.HasPrefix(got, "write PID file "+path) || !strings.Contains(got, "permission denied; this user needs the right") {
		t.Errorf("a folder of root's: %s", got)
	}
	checkFolder(t, dir)
	// Who cannot read the file cannot know whether its owner lives.
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	put(t, path, "17\n")
	if got := ask(); !strings.Contains(got, "permission denied; this user needs the right") {
		t.Errorf("a file of root's: %s", got)
	}
	check(t, path, 17, false)
}

// fullFolder returns a folder of a file system on which nothing more can be
// written but, with inodes left, empty files.
func fullFolder(t *testing.T, options string, fillIt func(dir string)) string {
	t.Helper()
	testutil.NeedRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		t.Fatalf("mount tmpfs: %v", err)
	}
	t.Cleanup(func() {
		testutil.WaitFor(t, 5*time.Second, func() bool {
			// A process that is being started has all descriptors for a moment.
			return !errors.Is(unix.Unmount(dir, 0), unix.EBUSY)
		}, "tmpfs is not busy")
	})
	fillIt(dir)
	return dir
}

func TestFullDisk(t *testing.T) {
	page := os.Getpagesize()
	dir := fullFolder(t, fmt.Sprintf("size=%d", 2*page), func(dir string) {
		put(t, filepath.Join(dir, "app.pid"), "17\n")
		put(t, filepath.Join(dir, "filler"), strings.Repeat("x", page))
	})
	testFull(t, dir)
}

func TestNoInodes(t *testing.T) {
	dir := fullFolder(t, "nr_inodes=3", func(dir string) { // one is the folder's
		put(t, filepath.Join(dir, "app.pid"), "17\n")
		put(t, filepath.Join(dir, "filler"), "")
	})
	testFull(t, dir)
}

func testFull(t *testing.T, dir string) {
	path := filepath.Join(dir, "app.pid")
	before := inode(t, path)
	for _, o := range []Options{{}, {Replace: true}} {
		f, err := Write(path, o)
		if f != nil || !errors.Is(err, unix.ENOSPC) || !strings.HasPrefix(err.Error(), "write PID file "+path) || !strings.Contains(err.Error(), "; make room there") {
			t.Errorf("%+v: %v, want ENOSPC", o, err)
		}
		checkFolder(t, dir, "app.pid", "filler")
		if pid, owned, err := Read(path); pid != 17 || owned || err != nil || inode(t, path) != before {
			t.Errorf("%+v: the file became %d, %t, %v", o, pid, owned, err)
		}
	}
	// A new file is not left half done, either.
	if f, err := Write(filepath.Join(dir, "new.pid"), Options{}); f != nil || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a new one: %v, want ENOSPC", err)
	}
	checkFolder(t, dir, "app.pid", "filler")
	// With room it works.
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Fatal(err)
	}
	f := write(t, path, Options{})
	check(t, path, os.Getpid(), true)
	if err := f.Remove(); err != nil {
		t.Error(err)
	}
}

// A Rewrite that fails can be tried again.
func TestRewriteFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.pid")
	f := write(t, path, Options{})
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := f.Rewrite(); err == nil || !strings.Contains(err.Error(), "no regular file") {
		t.Errorf("rewrite over a folder: %v", err)
	}
	checkFolder(t, filepath.Dir(path), "app.pid")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := f.Rewrite(); err != nil {
		t.Error(err)
	}
	check(t, path, os.Getpid(), true)
}
