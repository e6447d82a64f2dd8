// SPDX-License-Identifier: Apache-2.0

package vmtest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"instar/internal/vmtest/job"
)

// Defaults of Machine.
const (
	DefaultMemory  = 1024 // MiB
	DefaultTimeout = 10 * time.Minute
)

// DefaultTools are commands that tests execute.
var DefaultTools = []string{"sh", "sleep", "ls", "cat", "true"}

// Machine is a virtual machine for one program. Kernel, Guest, and Program have to be set.
type Machine struct {
	// Kernel was fetched.
	Kernel *Kernel
	// Guest is the program of BuildGuest.
	Guest string

	// Program is an executable file of the host; its libraries come along. Args are its
	// arguments.
	Program string
	Args    []string
	// Env is added to the program's environment, of which little else is there.
	Env []string
	// Dir is where it runs. Default "/".
	Dir string

	// Files and folders of the host are copied to the paths that are their keys.
	Files map[string]string
	// Tools are commands of the host, which are found by its PATH. They come with their
	// libraries.
	Tools []string
	// Modules of the kernel are loaded.
	Modules []string

	// Memory is in MiB. Default DefaultMemory.
	Memory int
	// CPUs count where the processor's virtualization can be used; else there is one.
	// Default 2.
	CPUs int
	// Timeout limits the time from the start of the machine to its end. Default
	// DefaultTimeout.
	Timeout time.Duration
	// Append is added to the kernel's command line.
	Append string

	// Output gets what the program prints.
	Output io.Writer
	// Console gets what the kernel prints, after the end. Default: nobody does.
	Console io.Writer
	// Log gets lines for people. Default: nobody does.
	Log io.Writer
}

// BuildGuest builds the first program of machines from the module in the folder, as a
// file in the folder into.
func BuildGuest(ctx context.Context, module, into string) (path string, err error) {
	path = filepath.Join(into, "guest")
	if err := Build(ctx, module, "build", path, "./internal/vmtest/guest"); err != nil {
		return "", err
	}
	return path, nil
}

// Build makes a static program of a package of the module: how is "build", or "test"
// for its tests.
func Build(ctx context.Context, module, how, path, pkg string) error {
	args := []string{how, "-o", path, pkg}
	if how == "test" {
		args = slices.Insert(args, 1, "-c")
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return nil
}

// programFolder is where the program is in the machine.
const programFolder = "/test"

// Run boots the machine and returns the program's exit code, 128 and the number of the
// signal when one ended it. The error wraps ErrTime when the program did not end in time.
// Any other means that it did not run, or not to its end: the machine is to blame.
func (m *Machine) Run(ctx context.Context) (code int, err error) {
	dir, err := os.MkdirTemp("", "vmtest-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	initramfs := filepath.Join(dir, "initramfs")
	if err := m.pack(ctx, initramfs); err != nil {
		return 0, fmt.Errorf("make file system of the virtual machine: %w", err)
	}
	image, err := m.Kernel.Image()
	if err != nil {
		return 0, err
	}
	h := hardware{
		memory: cmp.Or(m.Memory, DefaultMemory), cpus: cmp.Or(m.CPUs, 2),
		timeout: cmp.Or(m.Timeout, DefaultTimeout), append: m.Append,
	}
	with := accelerated()
	output := cmp.Or[io.Writer](m.Output, io.Discard)
	report, console, err := h.boot(ctx, with, image, initramfs, dir, output)
	if errors.Is(err, errNotStarted) {
		// Nothing of the program has happened, so it can be tried again: it happens in one of
		// some hundred boots, and KVM may not work for reasons of its own.
		m.log("%v with %s; trying again with %s; the console:\n%s", err, with, tcg, tail(console))
		with = tcg
		report, console, err = h.boot(ctx, with, image, initramfs, dir, output)
	}
	if m.Console != nil {
		_, _ = m.Console.Write(console)
	}
	if err != nil {
		return 0, fmt.Errorf("run under Linux %s (%s): %w%s", m.Kernel.Release, with, err, onConsole(console))
	}
	return report.Code, nil
}

func onConsole(console []byte) string {
	if text := strings.TrimSpace(tail(console)); text != "" {
		return "; the end of the console:\n" + text
	}
	return ""
}

func (m *Machine) log(format string, args ...any) {
	if m.Log != nil {
		fmt.Fprintf(m.Log, format+"\n", args...)
	}
}

// searchPath of the machine.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// pack writes the machine's file system.
func (m *Machine) pack(ctx context.Context, file string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	a := newArchive(f)
	a.device("/dev/console", 5, 1) // the guest's standard output
	if err := a.file("/init", m.Guest); err != nil {
		return err
	}
	a.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n")
	a.text("/etc/group", "root:x:0:\nnogroup:x:65534:\n")
	a.text("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
	a.folder("/root")

	j := job.Job{
		Args: append([]string{path.Join(programFolder, filepath.Base(m.Program))}, m.Args...),
		Env:  append([]string{"PATH=" + searchPath, "HOME=/root", "USER=root"}, m.Env...),
		Dir:  cmp.Or(m.Dir, "/"),
	}
	a.folder(j.Dir)
	if err := addProgram(a, j.Args[0], m.Program); err != nil {
		return err
	}
	for _, name := range m.Tools {
		source, err := exec.LookPath(name)
		if err != nil {
			return fmt.Errorf("find the command %s on this machine: %w", name, err)
		}
		if err := addProgram(a, "/bin/"+name, source); err != nil {
			return err
		}
	}
	for _, to := range slices.Sorted(maps.Keys(m.Files)) {
		if err := a.tree(to, m.Files[to]); err != nil {
			return err
		}
	}
	modules, err := m.Kernel.modules(ctx, m.Modules)
	if err != nil {
		return err
	}
	for _, mod := range modules {
		file := "/modules/" + mod.name + ".ko"
		a.text(file, string(mod.code))
		j.Modules = append(j.Modules, file)
	}
	text, err := json.Marshal(j)
	if err != nil {
		return err
	}
	a.text(job.Path, string(text))
	return errors.Join(a.close(), f.Close())
}

// addProgram adds an executable file and its libraries.
func addProgram(a *archive, name, source string) error {
	needed, err := libraries(source)
	if err != nil {
		return err
	}
	if err := a.file(name, source); err != nil {
		return err
	}
	for _, library := range needed {
		if err := a.file(library, library); err != nil {
			return err
		}
	}
	return nil
}

// Source is where Testdata puts a module.
const Source = "/src"

// Testdata finds the folders of the module that have files for tests, which are those
// named testdata, and the examples. In the machine they are below Source, in the same
// order, so that a test finds them from where its package is.
func Testdata(module string) (files map[string]string, err error) {
	files = map[string]string{}
	err = filepath.WalkDir(module, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !d.IsDir() || file == module {
			return nil
		}
		below, err := filepath.Rel(module, file)
		if err != nil {
			return err
		}
		if d.Name() == "testdata" || below == "examples" {
			files[path.Join(Source, filepath.ToSlash(below))] = file
			return fs.SkipDir
		}
		if strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		return nil
	})
	return files, err
}
